"""A device that runs out of memory: nobody gets an error for it, and nothing of it stays."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import torch

from pagebus.actors.executor import engine
from pagebus.actors.executor.loading.loaded import Loaded
from tests.helpers.oracle import make_oracle
from tests.system.harness import System, running

PROMPTS = [[number, *range(3 + number % 20)] for number in range(48)]
TOKENS = 8
FAILING_STEPS = (2, 12, 20)
"""Of all steps, whichever executor computes them: early, while many decode, late. Four in a row would be the end of a
request."""
FAILING_START = 2
"""Of all starts after the first one."""


async def generate_despite(system: System, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens, with a supervisor that starts executors again."""
    answers = asyncio.ensure_future(system.generate(prompts, max_tokens=TOKENS))
    while not answers.done():
        await system.restart_failed_executors()
        await asyncio.sleep(0.01)
    return answers.result()


def scarce(method: Any, failing: tuple[int, ...]) -> Any:
    """The function, which finds no memory the n-th time, for all n of ``failing``."""
    times = itertools.count(1)

    def maybe(*args: Any) -> Any:
        if next(times) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return method(*args)

    return maybe


async def test_out_of_memory(tmp_path, redis_bus_factory, monkeypatch):
    """Every step at which it happens costs the executor, and everybody gets the tokens that there would have been."""
    folder = make_oracle(tmp_path / "oracle")
    options = {"load_format": "dummy", "max_num_seqs": 16, "num_gpu_blocks_override": 512, "swap_space": 0.0}
    async with running(folder, redis_bus_factory, **options) as system:
        expected = await system.generate(PROMPTS, max_tokens=TOKENS)
        steps = scarce(Loaded.copy, FAILING_STEPS)  # what a step does once it is in the batch
        monkeypatch.setattr(Loaded, "copy", lambda self, plan, epoch: steps(self, plan, epoch))
        monkeypatch.setattr(engine, "load", scarce(engine.load, (FAILING_START,)))
        assert await generate_despite(system, PROMPTS) == expected
        assert await generate_despite(system, PROMPTS) == expected
        assert await system.failures() == []

        series = system.scheduler.metrics.snapshot()["series"]
        lost = [(labels["error"], told) for name, labels, told in series if name == "pagebus:lost_executors_total"]
        assert lost == [("OutOfMemoryError", {"value": len(FAILING_STEPS)})]
