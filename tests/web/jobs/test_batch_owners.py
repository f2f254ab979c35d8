"""One actor at a time writes the files of a batch, and one run of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagebus.bus.messages import BatchQueued
from pagebus.bus.streams import Names
from pagebus.web.jobs import batches
from pagebus.web.storage.files import Record, Store
from tests.helpers.waiting import LIMIT_S, until, until_empty
from tests.web.batch_world import World, ask, world_in


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("pagebus.web.jobs.actor.LOOK_S", 0.02)
    monkeypatch.setattr("pagebus.web.jobs.batches.SHOW_S", 0.02)
    async with world_in(tmp_path) as made:
        yield made


async def test_a_drain_waits_until_files_are_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread goes on when its task ends: the next actor would take back files that are still being made."""
    is_adding, may_go_on, has_ended, add = threading.Event(), threading.Event(), threading.Event(), Store.add
    finish = batches.BatchRun._finish

    def held(*args: Any, **options: Any) -> Record:
        record = add(*args, **options)
        if not is_adding.is_set():
            is_adding.set()
            assert may_go_on.wait(LIMIT_S)
        return record

    def finished(*args: Any) -> None:
        is_first = not is_adding.is_set()
        finish(*args)
        if is_first:
            has_ended.set()

    await world.begin()
    file_id = await world.upload(ask("a"))
    monkeypatch.setattr(Store, "add", held)
    monkeypatch.setattr(batches.BatchRun, "_finish", finished)
    batch_id = await world.batch(file_id)
    await until(is_adding.is_set)
    first, _ = world.jobs[0]
    first.request_drain()
    await until(lambda: first.parts.worker.leaving)
    await world.begin(lease_ttl_s=0.2)
    second, _ = world.jobs[1]
    for _ in range(3):  # it would take the batch over
        looked_s = second._next_look_s
        await until(lambda since_s=looked_s: second._next_look_s > since_s)
    may_go_on.set()
    await until(has_ended.is_set)
    batch = await world.ended(batch_id)
    await until_empty(world.backend.bus, second.names.jobs)
    assert (await world.lines(batch.output_file_id)).keys() == {"a"}
    files = [each.id async for each in world.client.files.list(purpose="batch_output")]
    assert files == [batch.output_file_id]


async def test_who_was_away_while_a_file_was_checked_writes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another actor has completed the batch meanwhile."""
    is_reading, may_go_on, check_file = threading.Event(), threading.Event(), batches.check_file

    def held(*args: Any) -> Any:
        if not is_reading.is_set():
            is_reading.set()
            assert may_go_on.wait(LIMIT_S)
        return check_file(*args)

    monkeypatch.setattr(batches, "check_file", held)
    await world.begin()
    first, _ = world.jobs[0]
    back, is_away, look = asyncio.Event(), asyncio.Event(), first._holding.look

    async def confirmed() -> None:
        is_away.set()
        await back.wait()

    async def looked(**options: bool) -> None:
        await back.wait()
        await look(**options)

    monkeypatch.setattr(first, "confirm_lease", confirmed)
    monkeypatch.setattr(first._holding, "look", looked)
    batch_id = await world.batch(await world.upload(ask("a")))
    await until(is_reading.is_set)
    await world.begin(lease_ttl_s=0.2)
    world.server.leases.pop(first.names.lease("jobs", first.name))
    assert (await world.ended(batch_id)).status == "completed"
    read = Store(world.folder, 1)
    before = read.find(batch_id)
    may_go_on.set()
    await until(is_away.is_set)
    assert read.find(batch_id) == before
    first.lease_lapsed()
    back.set()
    await until(lambda: not first._batches)
    assert read.find(batch_id) == before


@pytest.mark.parametrize("is_under_way", [True, False])
async def test_a_batch_that_is_queued_twice(world: World, *, is_under_way: bool) -> None:
    """Its lines are computed and written once."""
    world.backend.answers = False
    if is_under_way:
        await world.begin()
    batch_id = await world.batch(await world.upload(ask("a"), ask("b")))
    if is_under_way:
        await world.backend.requested(2)
    await world.backend.bus.publish([(Names().jobs, BatchQueued(batch_id=batch_id))])
    if not is_under_way:
        await world.begin()
        await world.backend.requested(2)
    (actor, _) = world.jobs[0]
    await until(lambda: len(actor._holding._running) == 2)
    for request in world.backend.requests:
        await world.backend._answer(request)
    batch = await world.ended(batch_id)
    await until_empty(world.backend.bus, Names().jobs)
    assert (await world.lines(batch.output_file_id)).keys() == {"a", "b"}
    assert len(world.backend.requests) == 2
