"""Where the time of long prompts goes: a llama8b layer's kernels beside each other, and chunks of an engine's prompt.

    python -m tests.gpu.bench.bench_long_prompts [--prompts 8192 15064 57344] [--repeats 3]

First the layer, 8192 tokens in bfloat16: its products and cuDNN's attention over so many earlier keys run again and
again until the GPU is hot, and each is timed where it stands; then attention alone. Then an engine without bus and
scheduler process: milliseconds to the first token, and the kernels of single chunks by torch's profiler.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from pagebus.actors.bench.driver.shapes import write_model_folder
from pagebus.kernels.layers.norm import add_rms_norm
from pagebus.kernels.linear.activation import silu_mul
from tests.gpu.bench.profile_steps import kernel_table, profiled
from tests.helpers.engine_driver import Driver

TOKENS, HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM = 8192, 4096, 14336, 32, 8, 128
PASTS = (0, 8192, 16384, 32768, 65536, 122880)
"""Earlier keys; 0: the tokens themselves, causally."""
PROFILED_TOKENS, PROFILED_CHUNKS = 32768, (1, 2, 4)
SECONDS = 0.4
WARM_TURNS = 400
"""About two seconds: before, a cool GPU was 6 to 10% faster."""

Calls = dict[str, Callable[[], object]]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def hot_microseconds(calls: Calls) -> dict[str, float]:
    """The mean time of each call; they take turns for ``SECONDS``, of which the first third does not count."""
    turns = 2
    for _ in range(2):  # the first tells how many turns there are time for
        torch.cuda.synchronize()
        began = time.perf_counter()
        events = [_turn(calls) for _ in range(turns)]
        torch.cuda.synchronize()
        turns = max(6, round(SECONDS * turns / (time.perf_counter() - began)))
    kept = events[len(events) // 3 :]
    times = [[begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(turn)] for turn in kept]
    return dict(zip(calls, (statistics.mean(of_one) for of_one in zip(*times, strict=True)), strict=True))


def _turn(calls: Calls) -> list[torch.cuda.Event]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for event, call in zip(events[1:], calls.values(), strict=True):
        call()
        event.record()
    return events


def layer_calls() -> tuple[Calls, dict[str, int]]:
    """A layer's products, norms and SiLU, and the operations of the products."""
    shapes = {
        "qkv": ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        "output": (HIDDEN, Q_HEADS * HEAD_DIM),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    weights = {name: tensor(*shape) * 0.02 for name, shape in shapes.items()}
    x, gated, residual, norm = (
        tensor(TOKENS, HIDDEN),
        tensor(TOKENS, INTERMEDIATE),
        tensor(TOKENS, HIDDEN),
        tensor(HIDDEN),
    )
    wide = tensor(TOKENS, 2 * INTERMEDIATE)
    calls: Calls = {
        "qkv": lambda: F.linear(x, weights["qkv"]),
        "output": lambda: residual.addmm_(x, weights["output"].t()),
        "norm": lambda: add_rms_norm(x, residual, norm, 1e-5),
        "gate_up": lambda: F.linear(x, weights["gate_up"]),
        "silu": lambda: silu_mul(wide),
        "down": lambda: residual.addmm_(gated, weights["down"].t()),
    }
    return calls, {name: 2 * TOKENS * rows * inputs for name, (rows, inputs) in shapes.items()}


def attention(past: int) -> tuple[Callable[[], object], int]:
    """cuDNN over ``past`` keys, and its operations. Queries lie beside keys and values, as in a pass."""
    q = tensor(TOKENS, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)[None, :, :Q_HEADS].transpose(1, 2)
    k, v = (tensor(past or TOKENS, KV_HEADS, HEAD_DIM)[None].transpose(1, 2) for _ in range(2))
    operations = 4 * Q_HEADS * HEAD_DIM * TOKENS * (past or TOKENS // 2)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return lambda: attend(q, k, v, None, True, 0.0, past == 0, False, scale=HEAD_DIM**-0.5), operations


def layer_lines() -> None:
    calls, operations = layer_calls()
    for _ in range(WARM_TURNS):
        _turn(calls)
    for past in PASTS:
        attend, pairs = attention(past)
        times = hot_microseconds({"attention": attend, **calls})
        alone = hot_microseconds({"attention": attend})["attention"]
        of = {"attention": pairs, **operations}
        rates = {name: f" ({of[name] / us / 1e6:.0f} TFLOP/s)" if name in of else "" for name, us in times.items()}
        print(
            f"8192 tokens, {f'{past} earlier keys' if past else 'causal'}: attention alone {alone:.0f} us, in a layer:"
        )
        print("   ", ", ".join(f"{name} {us:.0f} us{rates[name]}" for name, us in times.items()), flush=True)


class Engine:
    """One engine with dummy weights."""

    def __init__(self, longest: int) -> None:
        with tempfile.TemporaryDirectory() as parent:
            self.driver = Driver(
                write_model_folder("llama8b", Path(parent)), device="cuda", load_format="dummy", max_num_seqs=64,
                max_model_len=longest + 16, swap_space=0.0, enable_prefix_caching=False,
            )  # fmt: skip
        self._rng = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(self.driver.info.vocab_size) for _ in range(tokens)]

    def first_token_ms(self, tokens: int) -> float:
        """From the first plan to the first token."""
        scheduler, first_s = self.driver.scheduler(), []
        scheduler.add(self.prompt(tokens), 1)
        began = time.perf_counter()
        self.driver.drive(
            scheduler, on_result=lambda result: first_s.append(time.perf_counter()) if len(result.token_ids) else None
        )
        return (first_s[0] - began) * 1e3

    def profile_chunks(self) -> None:
        scheduler, number = self.driver.scheduler(), 0
        scheduler.add(self.prompt(PROFILED_TOKENS), 1)
        while (plan := scheduler.plan()) is not None:
            number += 1
            if number not in PROFILED_CHUNKS:
                scheduler.process(self.driver.run_plan(plan))
                continue
            with profiled() as profiler:
                scheduler.process(self.driver.run_plan(plan))
                torch.cuda.synchronize()
            table, idle, seconds = kernel_table(profiler, 10)
            print(f"chunk {number}: {seconds * 1e3:.1f} ms, no kernel in {idle:.1%} of it", flush=True)
            for row in table:
                print("   ", row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8192, 15064, 57344])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layer_lines()
    torch.cuda.empty_cache()
    engine = Engine(max(*arguments.prompts, PROFILED_TOKENS))
    engine.driver.synchronize()
    for tokens in arguments.prompts:
        engine.first_token_ms(tokens)  # plans of cuDNN
        times = [engine.first_token_ms(tokens) for _ in range(arguments.repeats)]
        print(f"{tokens} tokens: {statistics.median(times):.1f} ms to the first token, {[round(t, 1) for t in times]}")
    engine.profile_chunks()
    engine.driver.close()


if __name__ == "__main__":
    main()
