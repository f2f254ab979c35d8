"""A connection breaks after a command was applied and before its answer: at every place where it can, in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from pagebus.bus.contract import START, Bus, BusUnavailable, Completion, Entry, EntryId, LogEntry
from pagebus.bus.messages import AbortRequest, Message, StepPlan
from pagebus.bus.private_redis.server import PrivateRedis
from pagebus.bus.redis.bus import RedisBus
from tests.bus.redis.breaking_proxy import BreakingProxy

T = TypeVar("T")
GROUP = "g"
STREAMS = ("s", "t")
NAMES = Counter(f"{stream}{number}" for stream in STREAMS for number in range(5))
MOST_EXCHANGES = 200


@pytest.fixture
async def proxy(private_redis: PrivateRedis, tmp_path: Path) -> AsyncIterator[BreakingProxy]:
    """In front of a server of the test's own."""
    between = BreakingProxy(private_redis.url.removeprefix("unix://"), tmp_path / "proxy.sock")
    async with between.running():
        yield between


def abort(name: str) -> AbortRequest:
    return AbortRequest(request_id=name)


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """What every actor does: try until the bus is there."""
    while True:
        try:
            return await call()
        except BusUnavailable:
            continue


async def read(bus: Bus, consumer: str) -> list[Entry]:
    """Everything there is for a consumer, two entries at a time."""
    found: list[Entry] = []
    while entries := await insist(lambda: bus.read_group(GROUP, consumer, STREAMS, count=2, block_ms=0)):
        found += entries
    return found


async def at_every_exchange(proxy: BreakingProxy, direct: Bus, scenario: Callable[[Bus, Bus], Awaitable[None]]) -> None:
    """Run a scenario (on a bus behind the proxy, and a direct one) with the answer of each exchange lost in turn."""
    for breaks_at in range(MOST_EXCHANGES):
        await direct.delete(*STREAMS, "log")
        bus = RedisBus(proxy.url)
        proxy.begin(breaks_at)
        try:
            await scenario(bus, direct)
        except AssertionError as error:
            raise AssertionError(f"the answer of exchange {breaks_at} was lost: {error}") from error
        finally:
            await bus.close()
        if proxy.exchanges <= breaks_at:
            return
    raise AssertionError("the scenario does not end")


@pytest.fixture
async def direct(private_redis: PrivateRedis) -> AsyncIterator[Bus]:
    """A bus whose connections hold."""
    bus = RedisBus(private_redis.url)
    yield bus
    await bus.close()


async def test_every_entry_of_a_work_stream_is_handed_out_once(proxy: BreakingProxy, direct: Bus) -> None:
    """New entries of two streams: nobody else has seen them, so each comes as if for the first time."""

    async def scenario(bus: Bus, direct: Bus) -> None:
        for stream in STREAMS:
            await direct.create_group(stream, GROUP)
        assert await read(bus, "a") == []
        await direct.publish([(name[0], abort(name)) for name in NAMES])
        entries = await read(bus, "a")
        assert Counter(map(name_of, entries)) == Counter(
            f"{stream}{number}" for stream in STREAMS for number in range(5)
        )
        assert {entry.deliveries for entry in entries} == {1}
        await insist(lambda: bus.ack(GROUP, entries))
        assert [await direct.length(stream) for stream in STREAMS] == [0, 0]

    await at_every_exchange(proxy, direct, scenario)


async def test_every_entry_is_answered_once(proxy: BreakingProxy, direct: Bus) -> None:
    """Whichever answer of the server is lost, and with it the knowledge of what it has done."""

    async def scenario(bus: Bus, direct: Bus) -> None:
        for stream in STREAMS:
            await direct.create_group(stream, GROUP)
        await direct.publish([(name[0], abort(name)) for name in NAMES])
        entries = await read(bus, "a")
        completions = [Completion(entry, "out", abort(name_of(entry)), "sums", "done") for entry in entries]
        assert await insist(lambda: bus.complete(GROUP, completions)) == [""] * len(NAMES)
        assert Counter(map(name_of, await direct.read({"out": START}, block_ms=0))) == NAMES
        assert await direct.counters("sums") == [{"done": len(NAMES)}]
        await direct.delete("out", "sums")

    await at_every_exchange(proxy, direct, scenario)


async def test_every_entry_left_over_is_handed_out_once(proxy: BreakingProxy, direct: Bus) -> None:
    """Those that an earlier life of the consumer was given, and those of a dead one that are claimed beside reading."""

    async def scenario(bus: Bus, direct: Bus) -> None:
        for stream in STREAMS:
            await direct.create_group(stream, GROUP)
        await direct.publish([(name[0], abort(name)) for name in NAMES])
        for consumer, count in (("a", 3), ("dead", 2)):
            earlier = RedisBus(direct_url(direct))
            await earlier.read_group(GROUP, consumer, STREAMS, count=count, block_ms=0)
            await earlier.close()
        entries = await read(bus, "a")
        assert [entry.deliveries for entry in entries] == [2] * 6
        for stream in STREAMS:
            entries += await insist(lambda stream=stream: bus.claim(stream, GROUP, "a", "dead"))  # type: ignore[misc]
        entries += await read(bus, "a")
        assert Counter(map(name_of, entries)) == Counter(
            f"{stream}{number}" for stream in STREAMS for number in range(5)
        )
        assert {entry.deliveries for entry in entries[6:]} <= {2, 3}  # a claim whose answer is lost may count

    await at_every_exchange(proxy, direct, scenario)


async def test_every_log_entry_is_written_once(proxy: BreakingProxy, direct: Bus) -> None:
    """Entries that are appended again after a lost answer are there once, in order."""

    async def scenario(bus: Bus, direct: Bus) -> None:
        for first in (1, 3):
            plans = [StepPlan(step=step, planned_s=0.0, num_decodes=0) for step in (first, first + 1)]
            entries = [LogEntry("log", EntryId(7, plan.step), plan) for plan in plans]
            await insist(lambda entries=entries: bus.append(entries))  # type: ignore[misc]
        written = await insist(lambda: bus.read({"log": START}, block_ms=0))
        assert [entry.id.index for entry in written] == [1, 2, 3, 4]

    await at_every_exchange(proxy, direct, scenario)


def name_of(entry: Entry) -> str:
    message: Message | None = entry.message
    assert isinstance(message, AbortRequest)
    return message.request_id


def direct_url(bus: Bus) -> str:
    assert isinstance(bus, RedisBus)
    return bus._target.text
