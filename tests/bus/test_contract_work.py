"""Work streams: the promises of bus/contract.py, kept by MemoryBus and RedisBus alike."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.bus.contract import Bus, Completion, EntryId
from tests.bus.entries import GROUP, OpenBus, abort, publish, read_new, request_ids


async def test_group_reads_from_the_start_in_order(bus: Bus) -> None:
    """Entries published before the group existed are delivered, in order."""
    await publish(bus, "s", 1, 2)
    await publish(bus, "s", 3)
    await bus.create_group("s", GROUP)
    await bus.create_group("s", GROUP)
    entries = await read_new(bus, "s")
    assert request_ids(entries) == ["r1", "r2", "r3"]
    assert [entry.deliveries for entry in entries] == [1, 1, 1]
    assert sorted(entry.id for entry in entries) == [entry.id for entry in entries]


async def test_an_entry_goes_to_one_consumer(open_bus: OpenBus) -> None:
    """Two consumers of a group share the entries."""
    first, second = open_bus(), open_bus()
    await publish(first, "s", 1, 2, 3)
    await first.create_group("s", GROUP)
    assert request_ids(await read_new(first, "s", "a", count=2)) == ["r1", "r2"]
    assert request_ids(await read_new(second, "s", "b", count=2)) == ["r3"]
    assert await first.consumers("s", GROUP) == {"a": 2, "b": 1}


async def test_ack_deletes(bus: Bus) -> None:
    """An acked entry is neither pending nor in the stream; acking again changes nothing."""
    await publish(bus, "s", 1, 2)
    entries = await read_new(bus, "s")
    await bus.ack(GROUP, entries[:1])
    await bus.ack(GROUP, entries[:1])
    await bus.ack(GROUP, [])
    assert await bus.length("s") == 1
    assert await bus.consumers("s", GROUP) == {"a": 1}


async def test_an_entry_is_answered_once(open_bus: OpenBus) -> None:
    """The answer, its count and the end of the entry are one: a repeat adds nothing, nor does another consumer who has
    the entry too."""
    first, second = open_bus(), open_bus()
    await publish(first, "s", 1, 2)
    entries = await read_new(first, "s")
    assert await second.claim("s", GROUP, "b", "a") != []
    completions = [Completion(entry, "out", abort(7), "sums", "done") for entry in entries]
    assert await second.complete(GROUP, completions[:1]) == [""]
    assert await first.complete(GROUP, completions) == ["", ""]
    assert await second.complete(GROUP, completions) == ["", ""]
    assert await first.complete(GROUP, []) == []
    assert [await first.length(stream) for stream in ("s", "out")] == [0, 2]
    assert await first.counters("sums") == [{"done": 2}]
    assert await second.consumers("s", GROUP) == {"b": 0}


async def test_two_who_answer_at_once_give_one_answer(open_bus: OpenBus) -> None:
    """Each entry has the answer of one of them, whole: both have it under way, and neither waits for the other."""
    first, second = open_bus(), open_bus()
    await publish(first, "s", *range(300))
    entries = await read_new(first, "s", count=300)
    for start in range(0, 300, 50):
        mine, yours = entries[start : start + 40], entries[start + 10 : start + 50]
        completions = [
            [Completion(entry, out, abort(number), f"{out} sums", "done") for number, entry in enumerate(each)]
            for each, out in ((mine, "mine"), (yours[::-1], "yours"))
        ]
        told = await asyncio.gather(first.complete(GROUP, completions[0]), second.complete(GROUP, completions[1]))
        assert told == [[""] * 40] * 2
        assert sum([await first.length(out) for out in ("mine", "yours")]) == start + 50
    counts = await first.counters("mine sums", "yours sums")
    assert [each.get("done", 0) for each in counts] == [await first.length(out) for out in ("mine", "yours")]
    assert await first.length("s") == 0
    assert await first.consumers("s", GROUP) == {"a": 0}


async def test_restarted_consumer_gets_its_pending_entries_first(open_bus: OpenBus) -> None:
    """A new bus under the same consumer name reads what the old one left, with its delivery count, then new entries."""
    first = open_bus()
    await publish(first, "s", 1, 2, 3)
    left = await read_new(first, "s", count=2)
    await first.ack(GROUP, left[:1])
    again = open_bus()
    pending = await read_new(again, "s")
    assert request_ids(pending) == ["r2"]
    assert pending[0].deliveries == 2
    assert request_ids(await read_new(again, "s")) == ["r3"]
    assert await read_new(again, "s") == []


async def test_many_pending_entries_come_page_by_page(open_bus: OpenBus) -> None:
    """``count`` bounds each page of pending entries, and none is skipped or repeated."""
    first = open_bus()
    await publish(first, "s", *range(7))
    await read_new(first, "s")
    again = open_bus()
    pages = [request_ids(await read_new(again, "s", count=3)) for _ in range(4)]
    assert pages == [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r6"], []]


async def test_group_read_over_two_streams(bus: Bus) -> None:
    """One call reads new entries of all its streams, in the order of the streams."""
    await publish(bus, "t", 2)
    await publish(bus, "s", 1)
    entries = await bus.read_group(GROUP, "a", ["s", "t"], block_ms=0)
    assert [(entry.stream, *request_ids([entry])) for entry in entries] == [("s", "r1"), ("t", "r2")]


async def test_lost_group_is_made_again(bus: Bus) -> None:
    """Reading goes on after the stream and its group were deleted."""
    await publish(bus, "s", 1)
    await read_new(bus, "s")
    await bus.delete("s")
    assert await read_new(bus, "s") == []
    await bus.delete("s")
    await publish(bus, "s", 2)
    assert request_ids(await read_new(bus, "s")) == ["r2"]


async def test_claim_takes_over_everything_and_removes_the_consumer(open_bus: OpenBus) -> None:
    """A dead consumer's entries move with their delivery counts; a second claim finds nothing."""
    dead, alive = open_bus(), open_bus()
    await publish(dead, "s", *range(300))
    await read_new(dead, "s", "dead", count=300)
    await read_new(alive, "s", "alive")
    claimed = await alive.claim("s", GROUP, "alive", "dead")
    assert request_ids(claimed) == [f"r{number}" for number in range(300)]
    assert {entry.deliveries for entry in claimed} == {2}
    assert await alive.consumers("s", GROUP) == {"alive": 300}
    ids = [entry.id for entry in claimed[:2]]
    assert await dead.holders("s", GROUP, [*ids, EntryId(1, 1)]) == dict.fromkeys(ids, "alive")
    assert await alive.claim("s", GROUP, "alive", "dead") == []
    assert await read_new(alive, "s", "alive") == []
    await alive.ack(GROUP, claimed)
    assert await alive.length("s") == 0


async def test_what_was_let_go_and_is_given_back_comes_again(open_bus: OpenBus) -> None:
    """As by a server that comes back with less than it had. What is held does not come."""
    first, second, server = open_bus(), open_bus(), open_bus()
    await publish(first, "s", 1, 2)
    entries = await read_new(first, "s", "first")
    await second.claim("s", GROUP, "second", "first")
    await server.claim("s", GROUP, "first", "second")
    assert await read_new(first, "s", "first") == []
    first.let_go("s", GROUP, [entries[0].id])
    (again,) = await read_new(first, "s", "first")
    assert (again.id, request_ids([again])) == (entries[0].id, ["r1"])
    assert await read_new(first, "s", "first") == []


async def test_claim_without_stream_or_from_oneself(bus: Bus) -> None:
    """Claiming on a stream that does not exist finds nothing; claiming from oneself is a mistake."""
    assert await bus.claim("none", GROUP, "a", "b") == []
    assert await bus.consumers("none", GROUP) == {}
    assert await bus.holders("none", GROUP, [EntryId(1, 1)]) == {}
    with pytest.raises(ValueError, match="itself"):
        await bus.claim("none", GROUP, "a", "a")


async def test_entry_deleted_while_pending_is_not_delivered_again(open_bus: OpenBus) -> None:
    """A pending entry whose message is gone does not come back after a restart, nor by a claim."""
    first = open_bus()
    await publish(first, "s", 1, 2)
    entries = await read_new(first, "s")
    await first.trim("s", entries[0].id)
    again = open_bus()
    assert request_ids(await read_new(again, "s")) == ["r2"]
    other = open_bus()
    assert request_ids(await other.claim("s", GROUP, "b", "a")) == ["r2"]


async def test_blocked_group_read_is_woken(open_bus: OpenBus) -> None:
    """A waiting consumer gets an entry as soon as it is published."""
    reader, writer = open_bus(), open_bus()
    await reader.create_group("s", GROUP)
    waiting = asyncio.create_task(reader.read_group(GROUP, "a", ["s"], block_ms=30_000))
    await writer.ping()
    await publish(writer, "s", 1)
    assert request_ids(await waiting) == ["r1"]


async def test_cancelled_group_read_strands_nothing(open_bus: OpenBus) -> None:
    """Entries delivered to a read whose caller was cancelled come with the consumer's next read."""
    reader, writer = open_bus(), open_bus()
    await reader.create_group("s", GROUP)
    got: list[str] = []
    for number in range(20):
        waiting = asyncio.create_task(reader.read_group(GROUP, "a", ["s"], block_ms=1500))
        await writer.ping()
        await publish(writer, "s", number)
        waiting.cancel()
        try:
            got += request_ids(await waiting)
        except asyncio.CancelledError:
            got += request_ids(await reader.read_group(GROUP, "a", ["s"], block_ms=5000))
    assert got == [f"r{number}" for number in range(20)]
