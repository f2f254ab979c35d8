"""Batches whose entries the bus has lost are queued again: once, and only if nobody works on them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.telemetry.logs import get_logger
from pagebus.bus.contract import START, Entry
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.messages import BatchQueued, Job
from pagebus.bus.streams import Names
from pagebus.web.jobs import lost_batches
from pagebus.web.jobs.lost_batches import LostBatches
from pagebus.web.jobs.window import READ_COUNT
from pagebus.web.storage.files import Store, new_id
from tests.helpers.waiting import until
from tests.web.batch_world import World, ask, world_in

NAMES = Names()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(lost_batches, "SILENCE_S", 0.01)
    async with world_in(tmp_path) as made:
        yield made


async def lost(world: World) -> str:
    """A batch without an entry."""
    batch_id = await world.batch(await world.upload(ask("a"), ask("b")))
    await MemoryBus(world.server).delete(NAMES.jobs)
    return batch_id


async def queued(world: World) -> list[str]:
    entries = await MemoryBus(world.server).read({NAMES.jobs: START}, block_ms=0)
    return [entry.message.batch_id for entry in entries if isinstance(entry.message, BatchQueued)]


def looking(world: World, deployment: str = "pagebus", *running: str) -> LostBatches:
    store = Store(world.folder, 1)
    return LostBatches(MemoryBus(world.server), Names(deployment), store, lambda: running, get_logger())


async def test_a_jobs_actor_begins(world: World) -> None:
    """With a bus that is new, as after a start of a deployment whose Redis was a temporary one."""
    batch_id = await lost(world)
    await world.begin()
    batch = await world.ended(batch_id)
    assert batch.status == "completed"
    assert (await world.lines(batch.output_file_id)).keys() == {"a", "b"}


async def test_the_bus_comes_back_empty(world: World) -> None:
    """While a jobs actor is there, which had not read the entry."""
    batch_id, store = await lost(world), Store(world.folder, 1)
    record = store.find(batch_id)
    assert record is not None
    await world.begin()
    await world.ended(batch_id)
    store.save({**record, "id": (another := new_id("batch_"))})
    world.jobs[0][0].bus_restarted()
    assert (await world.ended(another)).status == "completed"


async def test_long_jobs_before_its_entry_are_read_a_few_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be as long as bodies over HTTP; the batch is found behind them all the same."""
    batch_id, bus = await lost(world), MemoryBus(world.server)
    await bus.publish([(NAMES.jobs, Job(request="x")) for _ in range(3 * READ_COUNT)])
    await bus.publish([(NAMES.jobs, BatchQueued(batch_id=batch_id))])
    read, most = MemoryBus.read, 0

    async def counted(*args: Any, **options: Any) -> list[Entry]:
        nonlocal most
        most = max(most, len(entries := await read(*args, **options)))
        return entries

    monkeypatch.setattr(MemoryBus, "read", counted)
    await looking(world).look()
    monkeypatch.undo()
    assert 0 < most <= READ_COUNT
    entries = await bus.read({NAMES.jobs: START}, count=1000, block_ms=0)
    assert sum(isinstance(each.message, BatchQueued) for each in entries) == 1


async def test_several_actors_queue_it_once(world: World) -> None:
    """The next one finds the entry of the first; so it does that of a batch that was never lost."""
    batch_id = await lost(world)
    await asyncio.gather(*(looking(world).look() for _ in range(4)))
    assert await queued(world) == [batch_id]


async def test_what_is_not_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another deployment's, is under way here, or another actor shows a sign of life at it."""
    batch_id = await lost(world)
    await looking(world, "other").look()
    await looking(world, "pagebus", batch_id).look()
    partial = Store(world.folder, 1).partial(batch_id, "output")
    partial.touch()
    sleep = asyncio.sleep

    async def meanwhile(seconds: float) -> None:
        os.utime(partial, (1, 1))
        await sleep(seconds)

    monkeypatch.setattr(lost_batches.asyncio, "sleep", meanwhile)
    await looking(world).look()
    assert await queued(world) == []


async def test_who_works_on_a_batch_shows_signs_of_life(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while no line ends."""
    monkeypatch.setattr("pagebus.web.jobs.batches.SHOW_S", 0.001)
    world.backend.answers = False
    await world.begin()
    batch_id = await world.batch(await world.upload(ask("a")))
    await world.backend.requested(1)
    store = Store(world.folder, 1)
    before = store.signs_of_life("pagebus")
    await until(lambda: store.signs_of_life("pagebus")[batch_id] != before[batch_id])
