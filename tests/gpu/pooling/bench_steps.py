"""How long a step of an encoder takes from a CUDA graph, and launched kernel by kernel, by rows and their tokens.

    python -m tests.gpu.pooling.bench_steps [bge-m3] [--largest 4096] [--device cpu]

The engine alone (no bus, no scheduler): milliseconds from a plan to its result, medians. ``--largest``: tokens of the
largest graph.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.gpu.pooling.bench_embeddings import EMBEDDERS, write_embedder
from tests.helpers.engine_driver import Driver

SHAPES = [
    *((1, tokens) for tokens in (16, 128, 512, 1024, 2048, 4096)),
    *((16, tokens) for tokens in (8, 32, 64, 128, 256)),
    *((64, tokens) for tokens in (4, 16, 32, 64)),
    *((256, tokens) for tokens in (1, 2, 4, 8, 16)),
]  # fmt: skip
WARM, STEPS = 3, 15


def step_ms(driver: Driver, rows: int, tokens: int) -> tuple[float, bool]:
    """One step of so many rows, of which the first token is pooled; and whether it ran from a graph."""
    took, replayed = [], False
    for _ in range(WARM + STEPS):
        scheduler = driver.scheduler()
        for row in range(rows):
            scheduler.add(range(10 + row, 10 + row + tokens), 1, pooled_from=0, pooled_until=1)
        plan = scheduler.plan()
        assert plan is not None
        assert len(plan.slots) == rows
        began_s = time.perf_counter()
        scheduler.process(driver.run_plan(plan))
        took.append((time.perf_counter() - began_s) * 1e3)
        replayed = driver.engine._loaded.runner.from_graph
        driver.drive(scheduler)
    return statistics.median(took[WARM:]), replayed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="bge-m3", choices=sorted(EMBEDDERS))
    parser.add_argument("--largest", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = write_embedder(arguments.name, Path(parent))
        driver = Driver(
            folder, device=arguments.device, load_format="dummy", swap_space=0, max_num_seqs=256,
            max_cudagraph_capture_size=arguments.largest,
        )  # fmt: skip
    runner = driver.engine._loaded.runner
    graphs = runner.graphs
    for rows, tokens in SHAPES:
        if graphs is None:
            print(f"{rows} rows of {tokens}: {step_ms(driver, rows, tokens)[0]:.2f} ms", flush=True)
            continue
        step_ms(driver, rows, tokens)  # what this step misses is captured
        driver.synchronize()
        from_graph, replayed = step_ms(driver, rows, tokens)
        runner.graphs = None
        eager, _ = step_ms(driver, rows, tokens)
        runner.graphs = graphs
        told = f"{from_graph:.2f} ms from a graph" if replayed else "no graph"
        print(f"{rows} rows of {tokens}: {told}, {eager:.2f} without", flush=True)
    driver.close()


if __name__ == "__main__":
    main()
