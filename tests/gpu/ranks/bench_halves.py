"""Prompts on two GPUs, in whole passes and in halves: ``python -m tests.gpu.ranks.bench_halves [--model llama8b]
[--layers 32] [--budgets 8192 4096 2048] [--blocks 16 32 64 128]``.

Prompt tokens per second of prompts of 2048 tokens, in steps of so many, with random weights. Of passes in halves for
each number of blocks that sums beside products have. All take turns.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor.models import halves
from pagebus.actors.executor.rank_actors import meet
from pagebus.actors.executor.ranks.links import avoid_multicast
from pagebus.actors.executor.ranks.peers import PeerComm
from pagebus.actors.settings import Settings
from pagebus.kernels.exchange.choice import Choice, choice_for
from tests.gpu.ranks.check import RankDriver
from tests.gpu.ranks.rank_processes import run_ranks

PROMPT, ROUNDS, STEPS, LIMIT_S = 2048, 3, 4, 400.0
WHOLE, CHOSEN = 0, -1
"""In place of a number of blocks: passes are not cut, or have the number of the table."""


def launch(comm: PeerComm, blocks: int) -> None:
    """From now on passes are whole, or in halves with so many blocks beside them."""
    halves.LEAST_BYTES = 1 << 62 if blocks == WHOLE else 0

    def choice(x: torch.Tensor, *, norm: bool) -> Choice:
        size, limits = x.numel() * x.element_size(), comm._layout.limits
        found = choice_for(size, comm.size, limits, norm=norm, beside=comm._is_beside)
        return found._replace(blocks=blocks) if comm._is_beside and blocks > 0 else found

    comm._choice = choice  # type: ignore[method-assign]


def seconds(driver: RankDriver, budget: int) -> float:
    """Of some steps of ``budget`` tokens."""
    scheduler = driver.scheduler(budget)
    for number in range(STEPS * max(1, budget // PROMPT)):
        scheduler.add([(7 * place + 31 * number) % 1000 for place in range(PROMPT)], 1)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    driver.drive(scheduler)
    return time.monotonic() - began_s


def run_rank(arguments: argparse.Namespace) -> None:
    avoid_multicast()
    torch.cuda.set_device(arguments.rank)
    with tempfile.TemporaryDirectory() as parent:
        SHAPES[arguments.model]["num_hidden_layers"] = arguments.layers
        folder = write_model_folder(arguments.model, Path(parent))
        settings = Settings(rank=arguments.rank, tensor_parallel_size=arguments.world, device="cuda")
        comm = meet(settings, arguments.store, "127.0.0.1", "peers", 0)
        driver = RankDriver(
            folder, comm, arguments.rank, arguments.world, device="cuda", dtype="bfloat16", load_format="dummy",
            enforce_eager=True, swap_space=0, max_model_len=4096, num_gpu_blocks_override=4000, spec_method="none",
            max_num_batched_tokens=max(arguments.budgets),
        )  # fmt: skip
        kinds = [WHOLE, CHOSEN, *arguments.blocks]
        for budget in arguments.budgets:
            took: dict[int, list[float]] = {blocks: [] for blocks in kinds}
            for turn in range(ROUNDS + 1):
                for blocks in kinds:
                    launch(comm, blocks)
                    comm.least(0.0)
                    found_s = -comm.least(-seconds(driver, budget))
                    if turn:
                        took[blocks].append(found_s)
            if arguments.rank == 0:
                print(f"{arguments.model}, {arguments.layers} layers, steps of {budget} tokens:")
                tell(took, budget)
    sys.stdout.flush()
    os._exit(0)


def tell(took: dict[int, list[float]], budget: int) -> None:
    """Print a line per way."""
    tokens = STEPS * max(1, budget // PROMPT) * PROMPT
    for blocks, each in took.items():
        way = {WHOLE: "whole", CHOSEN: "halves, as chosen"}.get(blocks, f"halves, {blocks} blocks")
        middle_s, rates = statistics.median(each), " ".join(f"{tokens / second:.0f}" for second in sorted(each))
        print(f"  {way:18} {1e3 * middle_s / STEPS:8.2f} ms a step, {tokens / middle_s:8.0f} tokens/s ({rates})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 4096, 2048])
    parser.add_argument("--blocks", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--store")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
    own = ["--model", arguments.model, "--layers", str(arguments.layers)]
    own += ["--budgets", *map(str, arguments.budgets), "--blocks", *map(str, arguments.blocks)]
    codes, texts = run_ranks("tests.gpu.ranks.bench_halves", own, LIMIT_S)
    print(texts[0])
    if any(codes):
        print("\n".join(texts[1:]), f"the ranks ended with {codes}")
    return max(map(abs, codes), default=math.inf)


if __name__ == "__main__":
    sys.exit(main())
