"""Log streams and mailboxes: the promises of bus/contract.py, kept by MemoryBus and RedisBus alike."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.bus.contract import FENCE_INDEX, START, Bus, EntryId, Fenced, LogEntry
from pagebus.bus.messages import ReplicaFenced, StepPlan
from tests.bus.entries import GROUP, OpenBus, log, publish, request_ids


async def test_append_and_read_after_a_position(bus: Bus) -> None:
    """Readers get what lies after their position, at most ``count``."""
    await bus.append([log("l", 1, index) for index in range(1, 6)])
    entries = await bus.read({"l": EntryId(1, 2)}, count=2, block_ms=0)
    assert [entry.id for entry in entries] == [EntryId(1, 3), EntryId(1, 4)]
    message = entries[0].message
    assert isinstance(message, StepPlan)
    assert message.step == 3
    assert message.slots.tolist() == [3]
    assert await bus.read({"l": EntryId(1, 5)}, block_ms=0) == []


async def test_own_repeat_is_a_success(bus: Bus) -> None:
    """Appending again what is already there, or trimmed away, adds nothing and raises nothing."""
    entries = [log("l", 3, index) for index in range(1, 4)]
    await bus.append(entries)
    await bus.append(entries[:2])
    await bus.append([*entries, log("l", 3, 4)])
    assert await bus.length("l") == 4
    assert await bus.trim("l", EntryId(3, 4)) == 4
    await bus.append(entries)
    assert await bus.length("l") == 0
    assert await bus.last_id("l") == EntryId(3, 4)


async def test_replaced_writer_is_fenced(bus: Bus) -> None:
    """After an entry of a higher epoch the old writer is refused, and its entry is not stored."""
    await bus.append([log("l", 1, 1)])
    await bus.append([log("l", 2, 1)])
    with pytest.raises(Fenced, match="epoch 1 was replaced by epoch 2"):
        await bus.append([log("l", 1, 2)])
    assert [entry.id for entry in await bus.read({"l": START}, block_ms=0)] == [EntryId(1, 1), EntryId(2, 1)]


async def test_fence_entry_stops_its_epoch(bus: Bus) -> None:
    """A fence entry refuses its epoch's later writes, may be repeated, and lets a higher epoch write."""
    fence = LogEntry("l", EntryId(5, FENCE_INDEX), ReplicaFenced(replica="x", reason="gone"))
    await bus.append([log("l", 5, 1)])
    await bus.append([fence])
    await bus.append([fence])
    with pytest.raises(Fenced, match="fenced"):
        await bus.append([log("l", 5, 2)])
    await bus.trim("l", fence.id)
    with pytest.raises(Fenced, match="fenced"):
        await bus.append([log("l", 5, 1)])
    await bus.append([log("l", 6, 1)])
    await bus.append([fence])
    assert await bus.last_id("l") == EntryId(6, 1)


async def test_fencing_on_one_stream_keeps_entries_of_others(bus: Bus) -> None:
    """Entries of other streams in the same append are stored."""
    await bus.append([log("l", 2, 1)])
    with pytest.raises(Fenced):
        await bus.append([log("l", 1, 1), log("m", 1, 1)])
    assert await bus.length("m") == 1


async def test_read_keeps_the_order_of_the_positions(bus: Bus) -> None:
    """Streams come in the order of the mapping, whatever was written first."""
    await bus.append([log("results", 1, 1), log("sequences", 1, 1)])
    entries = await bus.read({"sequences": START, "none": START, "results": START}, block_ms=0)
    assert [entry.stream for entry in entries] == ["sequences", "results"]


async def test_blocked_read_is_woken_by_any_of_its_streams(open_bus: OpenBus) -> None:
    """A waiting reader gets an entry of any stream it waits for, also of one that did not exist."""
    reader, writer = open_bus(), open_bus()
    for stream in ("l", "m"):
        waiting = asyncio.create_task(reader.read({"l": START, "m": START}, block_ms=30_000))
        await writer.ping()
        await writer.append([log(stream, 1, 1)])
        assert [entry.stream for entry in await waiting] == [stream]
        await writer.delete(stream)


async def test_read_waits_no_longer_than_told(bus: Bus) -> None:
    """A read of an empty stream returns nothing after its time."""
    assert await bus.read({"l": START}, block_ms=20) == []
    assert await bus.read_group(GROUP, "a", ["s"], block_ms=20) == []
    assert await bus.read({}, block_ms=20) == []


async def test_cancelled_read_leaves_the_bus_usable(open_bus: OpenBus) -> None:
    """Cancelling a blocked read neither loses entries nor mixes replies up."""
    reader, writer = open_bus(), open_bus()
    waiting = asyncio.create_task(reader.read({"l": START}, block_ms=2000))
    await writer.ping()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await writer.append([log("l", 1, 1)])
    await publish(writer, "mail", 1)
    assert request_ids(await reader.read({"mail": START}, block_ms=2000)) == ["r1"]
    assert [entry.id for entry in await reader.read({"l": START}, block_ms=2000)] == [EntryId(1, 1)]


async def test_trim_delete_length_of_missing_streams(bus: Bus) -> None:
    """What does not exist has no entries, and removing it is no error."""
    assert await bus.trim("none", EntryId(5, 5)) == 0
    assert await bus.length("none") == 0
    assert await bus.last_id("none") == START
    await bus.delete("none", "none2")
    await bus.delete()


async def test_trim_is_exact(bus: Bus) -> None:
    """Trimming removes what lies up to the position and nothing else, also for a mailbox's ids."""
    await bus.append([log("l", 1, index) for index in range(1, 300)])
    assert await bus.trim("l", EntryId(1, 123)) == 123
    assert (await bus.read({"l": START}, count=1, block_ms=0))[0].id == EntryId(1, 124)
    await publish(bus, "mail", 1, 2, 3)
    mail = await bus.read({"mail": START}, block_ms=0)
    assert await bus.trim("mail", mail[1].id) == 2
    assert request_ids(await bus.read({"mail": START}, block_ms=0)) == ["r3"]
    assert await bus.trim("l", EntryId(2, 2**64 - 1)) == 299 - 123
