"""Messages that are sent at once, without waiting for the outbox's turn."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from pagebus.bus.codec import encode
from pagebus.bus.contract import EntryId, LogEntry
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.bus.test_outbox import CountingBus, ids, make_outbox, plan, running


class PromptBus(CountingBus):
    """One that sends when it is called, and not only when somebody waits for the answer."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.sent: list[int] = []

    def append(self, entries: Sequence[LogEntry]) -> Coroutine[Any, Any, None]:  # type: ignore[override]
        self.sent.append(len(entries))
        for entry in entries:
            encode(entry.message)
        return super().append(entries)


async def test_who_hurries_does_not_wait_for_his_turn() -> None:
    """The message is on its way when the call returns; what is queued behind it follows, and none is sent twice."""
    bus = PromptBus(MemoryServer())
    outbox = make_outbox(bus)
    outbox.append("a", plan(1))
    outbox.hurry()
    assert bus.sent == []  # nobody would wait for the answer
    async with running(outbox):
        await outbox.flush()
        await asyncio.sleep(0)
        outbox.append("a", plan(2))
        outbox.append("b", plan(1))
        outbox.hurry()
        assert bus.sent == [1, 2]
        outbox.append("a", plan(3))
        outbox.hurry()
        assert bus.sent == [1, 2]
        await outbox.flush()
        assert bus.sent == [1, 2, 1]
        outbox.bus_restarted()
        outbox.append("a", plan(4))
        outbox.hurry()
        assert bus.sent == [1, 2, 1]  # first it is seen what is still there
        await outbox.flush()
    assert await ids(bus, "a") == [EntryId(3, index) for index in (1, 2, 3, 4)]


class TurningBus(PromptBus):
    """One whose answer arrives some turns of the loop after it was asked."""

    turns = 2

    def append(self, entries: Sequence[LogEntry]) -> Coroutine[Any, Any, None]:  # type: ignore[override]
        return self._later(super().append(entries))

    async def _later(self, sending: Coroutine[Any, Any, None]) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        await sending


async def test_the_loop_turns_until_what_waits_for_an_answer_is_on_its_way() -> None:
    """Once is enough if nothing waits; and nobody waits for an answer that does not come."""
    bus = TurningBus(MemoryServer())
    outbox = make_outbox(bus)
    async with running(outbox):
        await asyncio.sleep(0)
        for step in (1, 2, 3):
            outbox.append("a", plan(step))
            outbox.hurry()
            await outbox.turn()
            assert sum(bus.sent) == step
        await outbox.flush()
        bus.turns = 1000
        for step in (4, 5):
            outbox.append("a", plan(step))
            outbox.hurry()
            await outbox.turn()
        assert sum(bus.sent) == 4
        await outbox.flush()
    assert await ids(bus, "a") == [EntryId(3, index) for index in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("failing", ["fail_before", "fail_after"])
async def test_what_was_hurried_is_repeated(failing: str) -> None:
    bus = PromptBus(MemoryServer())
    outbox = make_outbox(bus)
    async with running(outbox):
        await asyncio.sleep(0)
        setattr(bus, failing, 1)
        outbox.append("a", plan(1))
        outbox.hurry()
        await outbox.flush()
    assert (outbox.retries, await ids(bus, "a")) == (1, [EntryId(3, 1)])


async def test_what_was_hurried_ends_with_the_outbox() -> None:
    """Nobody waits for the answer then."""
    bus = PromptBus(MemoryServer())
    outbox = make_outbox(bus)
    async with running(outbox):
        await asyncio.sleep(0)
        outbox.append("a", plan(1))
        outbox.hurry()
    assert bus.sent == [1]


@pytest.mark.parametrize("count", [1, 2])
async def test_on_redis_nothing_is_left_of_what_nobody_waits_for(
    redis_url: str, redis_names: Names, recwarn: pytest.WarningsRecorder, count: int
) -> None:
    """Alone, or as a transaction: it is stored, and Python does not warn of a coroutine that was never awaited."""
    bus, stream = RedisBus(redis_url, redis_names), redis_names.steps("gpu-0")
    outbox = make_outbox(bus)
    async with running(outbox):
        outbox.append(stream, plan(1))
        await outbox.flush()
        await asyncio.sleep(0)
        for step in range(count):
            outbox.append(stream, plan(2 + step))
        outbox.hurry()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
    assert await bus.length(stream) == 1 + count
    await bus.close()
