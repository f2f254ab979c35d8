"""Actors killed while drafts are verified: every answer is that of an engine without drafts that nobody disturbed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagebus.actors.scheduler.replica.drafts.prices import Prices
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.waiting import eventually
from tests.system.serving import Client, serving
from tests.system.speculation.test_answers import DRAFTS, ITSELF, LINE, SHIPPED, drafts, told

EAGLE3 = {"spec_method": "eagle3", "spec_tokens": 2}
TOKENS = 140
ASKED: list[dict[str, Any]] = [
    {"prompt": LINE * 3},
    {"prompt": LINE * 2, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 1},
    {"prompt": "a b a b a b a b", "temperature": 0.7, "seed": 1, "repetition_penalty": 1.2},
    {"prompt": LINE, "guided_regex": "(ab|cd|ef){300,400}", "temperature": 1.0, "seed": 2},
]


async def answers(client: Client) -> list[Any]:
    asked = [{"max_tokens": TOKENS, "ignore_eos": "guided_regex" not in each, **each} for each in ASKED]
    return [told(each) for each in await asyncio.gather(*(client.completion(**each) for each in asked))]


async def tokens(client: Client) -> float:
    return await client.metric(lambda line: line.startswith("vllm:generation_tokens_total"))


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Without drafts, and undisturbed."""

    async def ask() -> list[Any]:
        async with serving(SHIPPED, spec_method="none") as client:
            return await answers(client)

    return asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [DRAFTS, EAGLE3, ITSELF], ids=["lookup", "head", "small model"])
async def test_kills_change_no_token(
    drafter: dict[str, Any], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor, the detokenizer and the scheduler, one after another, when some drafts were right. Whatever these
    cost here, they are planned."""
    monkeypatch.setattr(Prices, "done", lambda self, launched_s, done_s: self._in_flight.popleft())
    server = MemoryServer()
    async with serving(SHIPPED, open_bus=lambda _: MemoryBus(server), lease_ttl_s=1.0, **drafter) as client:
        asking = asyncio.create_task(answers(client))
        for count, kind in ((60, "executor"), (160, "detokenizer"), (260, "scheduler")):

            async def are_there(count: int = count, kind: str = kind) -> bool:
                right = kind != "executor" or await drafts(client, "num_accepted_tokens") > 0
                return asking.done() or (right and await tokens(client) > count)

            await eventually(are_there)
            assert not asking.done(), f"all was over before the {kind} was killed"
            await client.replace(kind, MemoryBus(server))
        assert await asking == expected
        assert await drafts(client, "num_accepted_tokens") > 0
