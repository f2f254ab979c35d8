"""The promises of bus/contract.py, kept by MemoryBus and RedisBus alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bus.contract import (
    FENCE_INDEX,
    START,
    Answer,
    Bus,
    BusError,
    BusUnavailable,
    Entry,
    EntryId,
    Fenced,
    LeaseTaken,
    LogEntry,
)
from bus.dead_letters import drop, read_dead_letters, requeue
from bus.messages import AbortRequest, Message, ReplicaFenced, StepPlan

OpenBus = Callable[[], Bus]
GROUP = "workers"


def abort(number: int) -> AbortRequest:
    return AbortRequest(request_id=f"r{number}")


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, planned_s=0.5, num_decodes=1, slots=np.array([step], np.int32))


def log(stream: str, epoch: int, index: int) -> LogEntry:
    return LogEntry(stream, EntryId(epoch, index), plan(index % 1000))


def request_ids(entries: Sequence[Entry]) -> list[str]:
    found = []
    for entry in entries:
        assert isinstance(entry.message, AbortRequest)
        found.append(entry.message.request_id)
    return found


async def publish(bus: Bus, stream: str, *numbers: int) -> None:
    await bus.publish([(stream, abort(number)) for number in numbers])


async def read_new(bus: Bus, stream: str, consumer: str = "a", count: int = 128) -> list[Entry]:
    return await bus.read_group(GROUP, consumer, [stream], count=count, block_ms=0)


# -- work streams -----------------------------------------------------------------------------------------------------
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
    answers = [Answer(entry, "out", abort(7), "sums", "done") for entry in entries]
    assert await second.answer(GROUP, answers[:1]) == [""]
    assert await first.answer(GROUP, answers) == ["", ""]
    assert await second.answer(GROUP, answers) == ["", ""]
    assert await first.answer(GROUP, []) == []
    assert [await first.length(stream) for stream in ("s", "out")] == [0, 2]
    assert await first.counters("sums") == [{"done": 2}]
    assert await second.consumers("s", GROUP) == {"b": 0}


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
    assert await alive.claim("s", GROUP, "alive", "dead") == []
    assert await read_new(alive, "s", "alive") == []
    await alive.ack(GROUP, claimed)
    assert await alive.length("s") == 0


async def test_claim_without_stream_or_from_oneself(bus: Bus) -> None:
    """Claiming on a stream that does not exist finds nothing; claiming from oneself is a mistake."""
    assert await bus.claim("none", GROUP, "a", "b") == []
    assert await bus.consumers("none", GROUP) == {}
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


# -- log streams ------------------------------------------------------------------------------------------------------
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


# -- dead letters and state -------------------------------------------------------------------------------------------
async def test_dead_letter_keeps_message_and_reason(bus: Bus) -> None:
    """A dead letter can be read like any message and says why and from where it came."""
    await publish(bus, "s", 1)
    (entry,) = await read_new(bus, "s")
    await bus.dead_letter("tokenizer", entry, "does not fit")
    names = bus.names  # type: ignore[attr-defined]
    (kept,) = await bus.read({names.dead_letters("tokenizer"): START}, block_ms=0)
    assert request_ids([kept]) == ["r1"]
    assert kept.raw is not None
    assert kept.raw[b"dead.reason"] == b"does not fit"
    assert kept.raw[b"dead.stream"] == b"s"
    assert kept.raw[b"dead.id"] == str(entry.id).encode()


async def test_remove_takes_single_entries(bus: Bus) -> None:
    """Entries are removed wherever they lie; what is not there does not count."""
    await publish(bus, "mail", 1, 2, 3)
    mail = await bus.read({"mail": START}, block_ms=0)

    assert await bus.remove("mail", [mail[1].id, EntryId(1, 999)]) == 1
    assert await bus.remove("mail", []) == 0
    assert await bus.remove("nothing", [EntryId(1, 999)]) == 0
    assert request_ids(await bus.read({"mail": START}, block_ms=0)) == ["r1", "r3"]


async def test_dead_letters_are_sent_again_or_dropped(bus: Bus) -> None:
    """Work goes back to where it came from; what is no work, or cannot be read, can only be dropped."""
    names = bus.names  # type: ignore[attr-defined]
    await publish(bus, names.control, 1)
    (entry,) = await read_new(bus, names.control)
    await bus.dead_letter("scheduler", entry, "why")
    await bus.ack(GROUP, [entry])
    await bus.dead_letter("scheduler", Entry("log", EntryId(7, 8), abort(2), 3), "other")
    await bus.dead_letter("scheduler", Entry(names.control, EntryId(9, 9), None, 1, "torn", {b"x": b"y"}), "")

    first, second, third = await read_dead_letters(bus, names, "scheduler")
    assert (first.reason, first.source, first.request_id, first.deliveries) == ("why", names.control, "r1", 1)
    assert (second.source_id, second.deliveries, third.reason, third.message) == ("7-8", 3, "torn", None)
    for letter in (second, third):
        with pytest.raises(BusError):
            await requeue(bus, names, letter)
    await requeue(bus, names, first)
    assert request_ids(await read_new(bus, names.control)) == ["r1"]
    assert await drop(bus, names, "scheduler", [second.id, third.id]) == 2
    assert await read_dead_letters(bus, names, "scheduler") == []


async def test_dead_letters_are_bounded(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest dead letters go when there are too many."""
    for module in ("bus.memory_bus", "bus.redis_bus"):
        monkeypatch.setattr(f"{module}.DEAD_LETTERS_KEPT", 3)
    for number in range(5):
        await bus.dead_letter("stage", Entry("s", EntryId(1, number), abort(number)), "why")
    stream = bus.names.dead_letters("stage")  # type: ignore[attr-defined]
    assert request_ids(await bus.read({stream: START}, block_ms=0)) == ["r2", "r3", "r4"]


async def test_state_is_stored_replaced_and_removed(bus: Bus) -> None:
    """State comes back as it was put, several names at once, None where there is nothing."""
    await bus.put_state("a", {"x": [1, 2.5, "three", None]})
    await bus.put_state("b", {"y": 1}, ttl_s=1000)
    await bus.put_state("b", {"y": 2})
    assert await bus.get_state("b", "none", "a") == [{"y": 2}, None, {"x": [1, 2.5, "three", None]}]
    await bus.delete_state("a", "none")
    await bus.delete_state()
    assert await bus.get_state("a") == [None]
    assert await bus.get_state() == []


# -- leases -----------------------------------------------------------------------------------------------------------
async def test_lease_has_one_holder(open_bus: OpenBus) -> None:
    """A second taker is refused until the first has released; each grant has a larger epoch."""
    first, second = open_bus(), open_bus()
    epoch = await first.acquire_lease("scheduler", "leader", {"state": "starting"}, ttl_s=1000)
    with pytest.raises(LeaseTaken, match="already running"):
        await second.acquire_lease("scheduler", "leader", {}, ttl_s=1000)
    await second.release_lease("scheduler", "leader", epoch + 1)
    with pytest.raises(LeaseTaken):
        await second.acquire_lease("scheduler", "leader", {}, ttl_s=1000)
    await first.release_lease("scheduler", "leader", epoch)
    await first.release_lease("scheduler", "leader", epoch)
    assert await second.acquire_lease("scheduler", "leader", {}, ttl_s=1000) > epoch


async def test_renewing_replaces_the_info(bus: Bus) -> None:
    """A renewed lease shows its new info under the same epoch."""
    epoch = await bus.acquire_lease("executor", "e:0", {"state": "loading"}, ttl_s=1000)
    await bus.renew_lease("executor", "e:0", epoch, {"state": "ready", "num_blocks": 7}, ttl_s=1000)
    (lease,) = await bus.leases("executor")
    assert (lease.kind, lease.name, lease.epoch) == ("executor", "e:0", epoch)
    assert lease.info == {"state": "ready", "num_blocks": 7}


async def test_renewing_anothers_lease_is_fenced(bus: Bus) -> None:
    """A holder whose lease was taken by somebody else learns it."""
    epoch = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", epoch)
    newer = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    with pytest.raises(Fenced, match=f"belongs to epoch {newer}"):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", newer)
    with pytest.raises(Fenced):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)


async def test_a_revoked_lease_cannot_be_taken_back(bus: Bus) -> None:
    """Who slept through the end of its lease and was given up learns it; a lease that is held cannot be revoked."""
    epoch = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    assert not await bus.revoke_lease("executor", "e0")
    await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", epoch)
    await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", epoch)
    assert await bus.revoke_lease("executor", "e0")
    with pytest.raises(Fenced):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    assert await bus.leases() == []
    assert await bus.acquire_lease("executor", "e0", {}, ttl_s=1000) > epoch


async def test_leases_are_listed_by_kind_and_name(bus: Bus) -> None:
    """All live leases, or those of one kind, in order."""
    for kind, name in (("tokenizer", "t1"), ("executor", "e2"), ("executor", "e1"), ("exec", "z")):
        await bus.acquire_lease(kind, name, {}, ttl_s=1000)
    assert [(lease.kind, lease.name) for lease in await bus.leases()] == [
        ("exec", "z"),
        ("executor", "e1"),
        ("executor", "e2"),
        ("tokenizer", "t1"),
    ]
    assert [lease.name for lease in await bus.leases("executor")] == ["e1", "e2"]
    assert await bus.leases("detokenizer") == []


async def test_concurrent_takers_agree_on_one_holder(open_bus: OpenBus) -> None:
    """Of many that try at once, exactly one gets the lease."""
    takers = [open_bus() for _ in range(5)]
    results = await asyncio.gather(
        *(bus.acquire_lease("scheduler", "leader", {}, ttl_s=1000) for bus in takers), return_exceptions=True
    )
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, LeaseTaken) for result in results) == 4


# -- life -------------------------------------------------------------------------------------------------------------
async def test_close_ends_pending_reads(open_bus: OpenBus) -> None:
    """Reads that wait when the bus is closed return nothing; later calls are refused."""
    bus, other = open_bus(), open_bus()
    waiting = [
        asyncio.create_task(bus.read({"l": START}, block_ms=30_000)),
        asyncio.create_task(bus.read_group(GROUP, "a", ["s"], block_ms=30_000)),
    ]
    await other.ping()
    await bus.close()
    await bus.close()
    assert await asyncio.gather(*waiting) == [[], []]
    with pytest.raises(BusUnavailable, match="closed"):
        await publish(bus, "s", 1)
    with pytest.raises(BusUnavailable, match="closed"):
        await bus.read({"l": START}, block_ms=0)


async def test_nothing_mutable_is_shared(bus: Bus) -> None:
    """Changing what was published does not change what readers get, and arrays read are read-only."""
    slots = np.array([1, 2, 3], np.int32)
    message: Message = StepPlan(step=1, planned_s=0.0, num_decodes=0, slots=slots)
    await bus.append([LogEntry("l", EntryId(1, 1), message)])
    slots[:] = 9
    (entry,) = await bus.read({"l": START}, block_ms=0)
    assert isinstance(entry.message, StepPlan)
    assert entry.message.slots.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        entry.message.slots[0] = 5
