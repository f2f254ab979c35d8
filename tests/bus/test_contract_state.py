"""Dead letters and state: the promises of bus/contract.py, kept by MemoryBus and RedisBus alike."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.bus.contract import START, Bus, BusError, Entry, EntryId
from pagebus.bus.dead_letters import drop, read_dead_letters, requeue
from tests.bus.entries import GROUP, abort, publish, read_new, request_ids


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
    for module in ("pagebus.bus.memory.bus", "pagebus.bus.redis.bus"):
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


async def test_rows_are_stored_replaced_and_removed_one_by_one(bus: Bus) -> None:
    """Rows of a table do not touch each other; tables and state have names of their own."""
    assert await bus.get_rows("t") == {}
    assert await bus.put_row("t", "a", {"x": 1})
    assert await bus.put_row("t", "b/ü", {"x": [None, "two"]}, replace=False)
    assert not await bus.put_row("t", "a", {"x": 2}, replace=False)
    assert await bus.get_rows("t") == {"a": {"x": 1}, "b/ü": {"x": [None, "two"]}}
    assert not await bus.put_row("t", "a", {"x": 2})
    await bus.put_state("t", {"other": 1})
    await bus.put_row("u", "a", {})
    assert await bus.delete_row("t", "b/ü")
    assert not await bus.delete_row("t", "b/ü")
    assert not await bus.delete_row("none", "a")
    assert (await bus.get_rows("t"), await bus.get_rows("u")) == ({"a": {"x": 2}}, {"a": {}})


async def test_rows_put_at_once_are_all_there(bus: Bus) -> None:
    """And of many who would be the first to put the same row, one is."""
    await asyncio.gather(*(bus.put_row("t", str(number), {"n": number}) for number in range(50)))
    assert await bus.get_rows("t") == {str(number): {"n": number} for number in range(50)}
    first = await asyncio.gather(*(bus.put_row("t", "one", {"n": number}, replace=False) for number in range(50)))
    assert sum(first) == 1
    assert (await bus.get_rows("t"))["one"] == {"n": first.index(True)}
