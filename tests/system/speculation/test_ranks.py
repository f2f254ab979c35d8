"""Executors of two ranks whose drafts come from a head or a small model: a rank dies while they are verified."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from pagebus.actors.scheduler.replica.drafts.prices import Prices
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.waiting import LIMIT_S
from tests.system.harness import System, running
from tests.system.speculation.test_answers import ITSELF, SHIPPED
from tests.system.speculation.test_kills import EAGLE3

pytestmark = pytest.mark.share(4)

PROMPTS = [[5, 6, 7, 8] * 5, [9, 300, 41] * 8, list(range(100, 150))]
SAMPLED: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}]
TOKENS = 60
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "lease_ttl_s": 1.0}


async def answers(system: System) -> list[list[int]]:
    """Of each prompt in each way, beside each other."""
    asked = [
        system.submit(prompt, max_tokens=TOKENS, **sampling)[1] for prompt in PROMPTS for sampling in SAMPLED
    ]  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("drafter", [EAGLE3, ITSELF], ids=["head", "small model"])
async def test_a_rank_is_killed(drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group starts anew, then another scheduler leads: tokens are those of one rank that drafts nothing."""
    monkeypatch.setattr(Prices, "done", lambda self, launched_s, done_s: self._in_flight.popleft())
    async with running(SHIPPED, partial(MemoryBus, MemoryServer()), **SETTINGS, spec_method="none") as system:
        expected = await answers(system)
    ranks = {**SETTINGS, "tensor_parallel_size": 2, **drafter}
    async with running(SHIPPED, partial(MemoryBus, MemoryServer()), **ranks) as system:

        def right() -> int:
            return sum(each.step_results.acceptance.num_accepted for each in system.scheduler.core.replicas.values())

        asking = asyncio.create_task(answers(system))
        await system.until_tokens(100)
        assert right()
        await system.kill("executor-0.1")
        await system.restart_group("executor-0")
        await system.until_tokens(250)
        assert right()
        await system.replace_scheduler()
        assert await asking == expected
