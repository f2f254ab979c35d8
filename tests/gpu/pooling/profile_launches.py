"""Where the host's time goes when a lone prompt is launched kernel by kernel.

    python -m tests.gpu.pooling.profile_launches bge-m3 qwen3-embedding [--tokens 128 512] [--device cpu]

The engine alone (no bus, no scheduler), without CUDA graphs: milliseconds of the device thread for a step of one prompt
that is pooled, and the functions in which they pass, under a profiler, which makes all of it slower.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from pagebus.actors.executor.batch.step_work import StepWork
from tests.gpu.pooling.bench_embeddings import EMBEDDERS, write_embedder
from tests.helpers.engine_driver import Driver

WARM, STEPS, LINES = 10, 40, 20


def run(driver: Driver, name: str, tokens: int) -> None:
    """One prompt, of which the first token is pooled, or the last one."""
    first = EMBEDDERS[name][1] == "pooling_mode_cls_token"
    asked = {"pooled_from": 0, "pooled_until": 1} if first else {"pooled_from": tokens - 1}
    scheduler = driver.scheduler()
    scheduler.add(range(10, 10 + tokens), 1, **asked)
    driver.drive(scheduler)


@contextmanager
def timed(driver: Driver, profile: cProfile.Profile | None = None) -> Iterator[list[float]]:
    """Seconds in which the device thread launched each step with rows in this block."""
    engine, took = driver.engine, []
    launch = engine._run

    def noting(work: StepWork) -> torch.Tensor | None:
        if not len(work.slots):
            return launch(work)
        with nullcontext() if profile is None else profile:
            began = time.perf_counter()
            sampled = launch(work)
            took.append(time.perf_counter() - began)
        return sampled

    engine._run = noting  # type: ignore[method-assign]
    yield took
    engine._run = launch  # type: ignore[method-assign]


def report(name: str, tokens: int, driver: Driver) -> None:
    for _ in range(WARM):
        run(driver, name, tokens)
    profile = cProfile.Profile()
    with timed(driver) as took:
        for _ in range(STEPS):
            run(driver, name, tokens)
    with timed(driver, profile):
        for _ in range(STEPS):
            run(driver, name, tokens)
    print(f"{name}, {tokens} tokens: {statistics.median(took) * 1e3:.2f} ms, at least {min(took) * 1e3:.2f}")
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(LINES)
    table = out.getvalue().partition("ncalls")
    print(re.sub(r"/\S*/(?=triton/|torch/|pagebus/)", "", "".join(table[1:])).rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=sorted(EMBEDDERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for name in arguments.shapes:
        with tempfile.TemporaryDirectory() as parent:
            folder = write_embedder(name, Path(parent))
            driver = Driver(folder, device=arguments.device, load_format="dummy", swap_space=0, enforce_eager=True)
        for tokens in arguments.tokens:
            report(name, tokens, driver)
        driver.close()


if __name__ == "__main__":
    main()
