"""The outbox: order, ids, repeats, bounds, and how it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from pagebus.bus.backoff import Backoff
from pagebus.bus.contract import (
    FENCE_INDEX,
    START,
    Bus,
    BusUnavailable,
    CodecError,
    EntryId,
    Fenced,
    LogEntry,
    ServerRolledBack,
)
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AbortRequest, Message, ReplicaFenced, StepPlan
from pagebus.bus.outbox import BATCH_BYTES, Outbox, OutboxFull


class CountingBus(MemoryBus):
    """A memory bus that counts round trips and fails on demand, before or after the effect."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.trips: list[int] = []
        self.fail_before = 0
        self.fail_after = 0

    async def _trip(self, send: Callable[[], Any], size: int) -> None:
        self.trips.append(size)
        if self.fail_before:
            self.fail_before -= 1
            raise BusUnavailable("lost on the way")
        await send()
        if self.fail_after:
            self.fail_after -= 1
            raise BusUnavailable("answer lost")

    async def append(self, entries: Sequence[LogEntry]) -> None:
        await self._trip(lambda: super(CountingBus, self).append(entries), len(entries))

    async def publish(self, items: Iterable[tuple[str, Message]]) -> None:
        listed = list(items)
        await self._trip(lambda: super(CountingBus, self).publish(listed), len(listed))


@pytest.fixture
def bus() -> CountingBus:
    return CountingBus(MemoryServer())


@asynccontextmanager
async def running(outbox: Outbox) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(outbox.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def make_outbox(bus: Bus, epoch: int = 3, limit: int = 100) -> Outbox:
    return Outbox(bus, epoch, limit=limit, backoff=Backoff(0.0, 0.0))


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, planned_s=0.0, num_decodes=0)


async def ids(bus: Bus, stream: str) -> list[EntryId]:
    return [entry.id for entry in await bus.read({stream: START}, block_ms=0)]


async def test_entries_are_numbered_per_stream_and_sent_together(bus: CountingBus) -> None:
    """Each log stream counts from 1; all that is queued goes out in one round trip, in order."""
    outbox = make_outbox(bus)
    assert [outbox.append(stream, plan(1)) for stream in "aab"] == [EntryId(3, 1), EntryId(3, 2), EntryId(3, 1)]
    assert outbox.depth == 3
    async with running(outbox):
        await outbox.flush()
    assert bus.trips == [3]
    assert outbox.depth == 0
    assert await ids(bus, "a") == [EntryId(3, 1), EntryId(3, 2)]
    assert await ids(bus, "b") == [EntryId(3, 1)]


async def test_kinds_keep_their_order(bus: CountingBus) -> None:
    """Log entries and published messages leave in the order in which they were queued."""
    outbox = make_outbox(bus)
    outbox.append("a", plan(1))
    outbox.publish("m", AbortRequest(request_id="x"))
    outbox.publish("n", AbortRequest(request_id="y"))
    outbox.append("a", plan(2))
    async with running(outbox):
        await outbox.flush()
    assert bus.trips == [1, 2, 1]
    assert await bus.length("m") == await bus.length("n") == 1


async def test_sends_what_comes_later(bus: CountingBus) -> None:
    """A running outbox sends each new message without being asked."""
    outbox = make_outbox(bus)
    async with running(outbox):
        for index in range(1, 4):
            outbox.append("a", plan(index))
            await bus.read({"a": EntryId(3, index - 1)}, block_ms=5000)
            await outbox.flush()
    assert bus.trips == [1, 1, 1]


async def test_unknown_outcome_is_repeated_without_duplicates(bus: CountingBus) -> None:
    """A send that failed before or after its effect is repeated; log entries are stored once."""
    bus.fail_before, bus.fail_after = 2, 2
    outbox = make_outbox(bus)
    outbox.append("a", plan(1))
    outbox.append("a", plan(2))
    async with running(outbox):
        await outbox.flush()
    assert outbox.retries == 4
    assert outbox.trouble == ""
    assert await ids(bus, "a") == [EntryId(3, 1), EntryId(3, 2)]


async def test_fenced_ends_the_outbox(bus: CountingBus) -> None:
    """Fenced comes out of run(); afterwards nothing more is taken, and flush does not hang."""
    await bus.append([LogEntry("a", EntryId(9, 1), plan(1))])
    outbox = make_outbox(bus)
    outbox.append("a", plan(1))
    with pytest.raises(Fenced):
        await outbox.run()
    with pytest.raises(BusUnavailable, match="stopped"):
        outbox.publish("m", AbortRequest(request_id="x"))
    with pytest.raises(BusUnavailable, match="stopped"):
        await outbox.flush()


async def test_fence_entry_has_the_callers_id(bus: CountingBus) -> None:
    """A fence is appended under its own id and uses up no index."""
    outbox = make_outbox(bus)
    outbox.append_at("a", EntryId(2, FENCE_INDEX), ReplicaFenced(replica="r", reason="gone"))
    assert outbox.append("a", plan(1)) == EntryId(3, 1)
    async with running(outbox):
        await outbox.flush()
    assert await ids(bus, "a") == [EntryId(2, FENCE_INDEX), EntryId(3, 1)]


async def test_a_full_outbox_refuses(bus: CountingBus) -> None:
    """Beyond its limit a message is refused and no index is lost."""
    outbox = make_outbox(bus, limit=2)
    outbox.append("a", plan(1))
    outbox.append("a", plan(2))
    with pytest.raises(OutboxFull):
        outbox.append("a", plan(3))
    async with running(outbox):
        await outbox.flush()
        assert outbox.append("a", plan(3)) == EntryId(3, 3)
        await outbox.flush()


async def test_message_that_cannot_be_encoded_ends_the_outbox(bus: CountingBus) -> None:
    """A mistake in a message is not retried for ever."""
    outbox = make_outbox(bus)
    outbox.append("a", StepPlan(step=1, planned_s=0.0, num_decodes=0, slots=np.zeros(1, np.int64)))  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="slots"):
        await outbox.run()


async def test_whoever_is_told_of_what_cannot_be_encoded_goes_on(bus: CountingBus) -> None:
    """It alone is dropped, and the others keep their order; but no log stream gets a gap."""
    outbox, told = make_outbox(bus), []
    outbox.drop_unsendable(lambda message, error: told.append((message, str(error))))
    bad = AbortRequest(request_id="\ud800")
    for message in (AbortRequest(request_id="1"), bad, AbortRequest(request_id="2"), bad):
        outbox.publish("m", message)
    async with running(outbox):
        await outbox.flush()
        outbox.publish("m", bad)
        await outbox.flush()
    assert outbox.depth == 0

    sent = [entry.message for entry in await bus.read({"m": START}, count=9, block_ms=0)]
    assert sent == [AbortRequest(request_id="1"), AbortRequest(request_id="2")]
    assert [message for message, _ in told] == [bad, bad, bad]
    outbox = make_outbox(bus)
    outbox.drop_unsendable(lambda message, error: None)
    outbox.append("a", StepPlan(step=1, planned_s=0.0, num_decodes=0, slots=np.zeros(1, np.int64)))  # type: ignore[arg-type]
    with pytest.raises(CodecError):
        await outbox.run()


async def test_nothing_is_lost_over_random_failures(bus: CountingBus) -> None:
    """Whatever fails when, every log entry is stored exactly once and in order, every message at least once."""
    rng = random.Random(5)
    outbox = make_outbox(bus, limit=10_000)
    async with running(outbox):
        for index in range(1, 200):
            bus.fail_before, bus.fail_after = rng.choice([0, 0, 1, 2]), rng.choice([0, 0, 1])
            outbox.append("a", plan(index))
            outbox.publish("m", AbortRequest(request_id=str(index)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await outbox.flush()
    assert await ids(bus, "a") == [EntryId(3, index) for index in range(1, 200)]
    mail = [entry.message for entry in await bus.read({"m": START}, count=5000, block_ms=0)]
    seen = [message.request_id for message in mail if isinstance(message, AbortRequest)]
    assert list(dict.fromkeys(seen)) == [str(index) for index in range(1, 200)]


def test_backoff_grows_to_its_bound_and_starts_over() -> None:
    """Pauses double up to the bound, never less than half of it by jitter, and start over after a success."""
    backoff = Backoff(0.1, 1.0, random.Random(1))
    pauses = [backoff.next_s() for _ in range(8)]
    for pause, full in zip(pauses, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
        assert full / 2 <= pause <= full
    backoff.reset()
    assert backoff.next_s() <= 0.1


async def test_a_server_that_has_lost_something_is_not_written_to(bus: CountingBus) -> None:
    """Started anew while a send is under way, and once more while it is asked what it has: only then something is
    missing. Nothing queued hides that."""
    outbox = make_outbox(bus)
    last_id = bus.last_id

    async def found_again(stream: str) -> EntryId:
        found, bus.last_id = await last_id(stream), last_id  # type: ignore[method-assign]
        del bus.server.streams["a"]
        outbox.bus_restarted()
        return found

    async with running(outbox) as task:
        outbox.append("a", plan(1))
        await outbox.flush()
        outbox.append("a", plan(2))
        bus.fail_before, bus.last_id = 1, found_again  # type: ignore[method-assign]
        outbox.bus_restarted()
        with pytest.raises(ServerRolledBack, match="a ends with 0-0, 3-1 had been stored"):
            await task
    assert await ids(bus, "a") == []


async def test_a_stream_that_is_deleted_while_the_server_is_asked_is_no_loss(bus: CountingBus) -> None:
    """Its actor is gone for good, and that is noticed between the question what the stream ends with and the answer."""
    outbox = make_outbox(bus)
    last_id = bus.last_id

    async def deleted_meanwhile(stream: str) -> EntryId:
        bus.last_id = last_id  # type: ignore[method-assign]
        outbox.forget([stream])
        await bus.delete(stream)
        return await last_id(stream)

    async with running(outbox) as task:
        for stream in "ab":
            outbox.append(stream, plan(1))
        await outbox.flush()
        bus.last_id = deleted_meanwhile  # type: ignore[method-assign]
        outbox.bus_restarted()
        outbox.append("b", plan(2))
        await outbox.flush()
        assert not task.done()
    assert await ids(bus, "b") == [EntryId(3, 1), EntryId(3, 2)]


async def test_an_idle_outbox_asks_as_well(bus: CountingBus) -> None:
    """A restart that is told while the last message is on its way is not forgotten once that has arrived."""
    outbox = make_outbox(bus)
    append = bus.append

    async def lose(entries: Sequence[LogEntry]) -> None:
        await append(entries)
        outbox.bus_restarted()
        del bus.server.streams["a"]

    bus.append = lose  # type: ignore[method-assign]
    outbox.append("a", plan(1))
    with pytest.raises(ServerRolledBack):
        await outbox.run()


async def test_a_batch_of_long_messages_is_short(bus: CountingBus) -> None:
    """It ends with the message that makes it longer than may be; whatever else is to be said waits no longer for it."""
    outbox = make_outbox(bus)
    for number, size in enumerate((10, BATCH_BYTES, 1, 5 * BATCH_BYTES, 5 * BATCH_BYTES, 1)):
        outbox.publish("s", AbortRequest(request_id=str(number)), num_bytes=size)
    async with running(outbox):
        await outbox.flush()
    assert bus.trips == [2, 2, 1, 1]
    told = [entry.message.request_id for entry in await bus.read({"s": START}, block_ms=0)]  # type: ignore[union-attr]
    assert told == list("012345")


async def test_others_have_a_turn_between_batches(bus: CountingBus) -> None:
    """Over a bus that is there at once, too: whoever queues a thousand messages does not stop the loop."""
    outbox, depths = make_outbox(bus, limit=1000), []
    for _ in range(1000):
        outbox.publish("s", AbortRequest(request_id="r"))
    async with running(outbox):
        while outbox.depth:
            depths.append(outbox.depth)
            await asyncio.sleep(0)
    assert depths[0] == 1000
    assert len(set(depths)) == len(bus.trips) == 8
