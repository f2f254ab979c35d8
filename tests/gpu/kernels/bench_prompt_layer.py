"""Times a dense layer of prompts while the GPU is warm: `python -m tests.gpu.kernels.bench_prompt_layer [--profile]`.

Layers of the same kernels as an engine's run one behind the other for tenths of a second, each way of computing them by
turns, because power bounds such steps: what is faster alone may be slower here. Prints milliseconds of a layer for each
way, and with --profile the microseconds of its kernels.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.hopper_prefill import hopper_attention
from pagebus.kernels.layers import branch_norm
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write
from pagebus.kernels.linear import activation
from pagebus.kernels.linear.linear import gated_linear
from pagebus.kernels.specialized.hopper_prompts import PromptConfig
from tests.gpu.kernels.bench_heads import CUDA, Cache, Shape, ints

HEADS, HIDDEN, WIDTH = Shape("gemma9b", 16, 8, 256, 4096, 50.0), 3584, 14336
ROWS, QUERIES, LAYERS = 4, 2048, 4
WAYS: dict[str, PromptConfig | None] = {
    "library": None,
    "bands of 11": PromptConfig(11),
    "bands of 22": PromptConfig(22),
}


class Layers:
    """Weights and pages of some layers, and a step's tokens."""

    def __init__(self) -> None:
        tokens, all_heads = ROWS * QUERIES, HEADS.q_heads + 2 * HEADS.kv_heads
        sizes = {"qkv": (all_heads * HEADS.head_dim, HIDDEN), "o": (HIDDEN, HEADS.q_heads * HEADS.head_dim),
                 "gate": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}  # fmt: skip
        self.weights = [
            {name: torch.randn(size, dtype=torch.bfloat16, device=CUDA) * 0.02 for name, size in sizes.items()}
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.cache = Cache(HEADS, ROWS, QUERIES)
        self.x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=CUDA).normal_()
        self.residual = self.x.clone()
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=CUDA)
        positions = torch.arange(tokens, device=CUDA)
        self.positions = positions % QUERIES
        table = self.cache.table.flatten().long()
        self.mapping = table[positions // 16] * 16 + positions % 16
        angle = torch.rand(QUERIES, HEADS.head_dim // 2, device=CUDA)
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
        self.rows = tuple(LongRow(row, row * QUERIES, QUERIES, QUERIES, True) for row in range(ROWS))
        self.slots = ints([*range(ROWS)])

    def run(self, index: int, config: PromptConfig | None) -> None:
        w, (k, v) = self.weights[index % LAYERS], self.cache.layer(index % 8)
        qkv = F.linear(self.x, w["qkv"]).view(len(self.x), -1, HEADS.head_dim)
        q = rotary_kv_write(qkv, self.positions, self.cos_sin, k, v, self.mapping)
        _, *projected = qkv.split_with_sizes((HEADS.q_heads, HEADS.kv_heads, HEADS.kv_heads), dim=1)
        out = torch.empty(q.shape, dtype=q.dtype, device=CUDA)
        hopper_attention(
            q, k, v, out, self.slots, self.cache.table, HEADS.head_dim**-0.5, self.rows, None,
            (projected[0], projected[1]), HEADS.window, HEADS.softcap,
        )  # fmt: skip
        x = self.add(F.linear(out.flatten(1), w["o"]))
        if config is None:
            wide = activation.activation_mul(F.linear(x, w["gate"]), "gelu_tanh")
        else:
            wide = gated_linear(x, w["gate"], None, config=config, act="gelu_tanh")
        self.x = self.add(F.linear(wide, w["down"]))

    def add(self, x: torch.Tensor) -> torch.Tensor:
        out = branch_norm.add_normed(x, self.residual, self.norm, 1e-6, self.norm)
        assert out is not None
        return out


def error_of(config: PromptConfig) -> float:
    """How far our product lies from the library's."""
    x = torch.randn(ROWS * QUERIES, HIDDEN, dtype=torch.bfloat16, device=CUDA)
    weight = torch.randn(2 * WIDTH, HIDDEN, dtype=torch.bfloat16, device=CUDA) * 0.02
    expected = activation.activation_mul(F.linear(x, weight), "gelu_tanh").float()
    found = gated_linear(x, weight, None, config=config, act="gelu_tanh").float()
    return float((found - expected).norm() / expected.norm())


def tell_error(name: str, config: PromptConfig) -> None:
    """In a process of its own, which may hang, and compiles beside others."""
    began = time.perf_counter()
    error = error_of(config)
    print(f"{name}: error {error:.1e}, after {time.perf_counter() - began:.1f} s", flush=True)
    assert error < 1e-2


def right_ways(patience_s: float) -> dict[str, PromptConfig | None]:
    """Those whose products are right."""
    context = multiprocessing.get_context("spawn")
    tried = {name: context.Process(target=tell_error, args=(name, way)) for name, way in WAYS.items() if way}
    for process in tried.values():
        process.start()
    end = time.perf_counter() + patience_s
    for process in tried.values():
        process.join(max(0.0, end - time.perf_counter()))
        if process.is_alive():
            process.kill()
            process.join()
    return {name: way for name, way in WAYS.items() if name not in tried or tried[name].exitcode == 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=30, help="layers at a time")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ways = right_ways(40.0)
    layers = Layers()
    print(torch.cuda.get_device_name(), flush=True)
    times = defaultdict(list)

    def block(config: PromptConfig | None, count: int) -> None:
        for index in range(count):
            layers.run(index, config)

    for _ in range(arguments.rounds):
        for name, way in ways.items():
            block(way, 10)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            block(way, arguments.count)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / arguments.count)
    for name, found in times.items():
        print(f"{name:24} {statistics.median(found[1:]):.3f} ms a layer ({min(found[1:]):.3f} to {max(found[1:]):.3f})")
    if arguments.profile:
        for name, way in ways.items():
            print_kernels(name, lambda way=way: block(way, arguments.count))  # type: ignore[misc]


def print_kernels(name: str, run: Callable[[], None]) -> None:
    run()
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        run()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name].append(event.time_range.end - event.time_range.start)
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    whole = spans[-1][1] - spans[0][0]
    gaps = sum(max(0.0, b[0] - a[1]) for a, b in itertools.pairwise(spans))
    print(f"{name}: no kernel in {gaps / whole:.1%}")
    for kernel, found in sorted(totals.items(), key=lambda item: -sum(item[1])):
        half = found[len(found) // 2 :]
        print(f"   {len(found):4} x {statistics.mean(half):8.1f} us  {kernel[:80]}")


if __name__ == "__main__":
    main()
