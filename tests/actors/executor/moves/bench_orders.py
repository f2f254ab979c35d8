"""Prints what lies between a plan that pulls and its first copy.

Run: ``python -m tests.actors.executor.moves.bench_orders``.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np

from pagebus.actors.executor.batch import checks
from pagebus.actors.executor.moves.carriers.runs import runs
from pagebus.bus.messages import BlockPull, StepPlan

COUNT, NUM_BLOCKS, MOST = 937, 40_000, 32
NUMBER, REPEATS = 100, 15


def main() -> None:
    """Measure."""
    beside = np.arange(COUNT, dtype=np.int32)
    scattered = np.random.default_rng(0).permutation(NUM_BLOCKS)[:COUNT].astype(np.int32)
    pull = BlockPull(pull=1, address="", num_blocks=COUNT, at_once=True)
    plan = StepPlan(step=1, planned_s=0.0, num_decodes=0, pulls=(pull,), pull_sources=beside, pull_blocks=scattered)
    ways: dict[str, Callable[[], object]] = {
        "checked": lambda: checks.pulls(plan, NUM_BLOCKS),
        "joined, side by side": lambda: runs(beside, beside, MOST),
        "joined, scattered": lambda: runs(scattered, beside, MOST),
    }
    for name, way in ways.items():
        least_s = min(timeit.repeat(way, number=NUMBER, repeat=REPEATS)) / NUMBER
        print(f"{COUNT} blocks {name}: {least_s * 1e6:.1f} us")


if __name__ == "__main__":
    main()
