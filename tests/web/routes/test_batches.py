"""Batches over HTTP, spoken to by OpenAI's own client, with the jobs actor behind them."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import json
import threading
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import openai
import pytest

from pagebus.actors.telemetry.metrics import render
from pagebus.bus.messages import Job
from pagebus.web.jobs import batches
from pagebus.web.jobs.batches import Progress
from pagebus.web.jobs.lines import Result
from pagebus.web.jobs.tally import Tally
from pagebus.web.storage import files
from pagebus.web.storage.files import Record, Store, new_id
from tests.helpers.waiting import LIMIT_S, until
from tests.web.batch_world import URL, World, ask, usage_of, world_in
from tests.web.fake_backend import MODEL, SENTENCE


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """With actors that look around, and tell how far they are, more often than once a second."""
    monkeypatch.setattr("pagebus.web.jobs.actor.LOOK_S", 0.02)
    monkeypatch.setattr("pagebus.web.jobs.batches.SHOW_S", 0.02)
    async with world_in(tmp_path) as made:
        yield made


async def test_a_batch_is_worked_off(world: World) -> None:
    """Answers in one file, refusals in another; every line in one of them, and the counts say so."""
    await world.begin()
    asked = [ask(f"{i}") for i in range(20)] + [ask("bad", nonsense=1)]
    batch_id = await world.batch(await world.upload(*asked), metadata={"for": "test"})
    batch = await world.ended(batch_id)

    assert (batch.status, batch.metadata) == ("completed", {"for": "test"})
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
    assert (batch.model, batch.usage) == (MODEL.name, usage_of(20))
    output, errors = await world.lines(batch.output_file_id), await world.lines(batch.error_file_id)
    assert output.keys() == {f"{i}" for i in range(20)}
    assert output["3"]["response"]["body"]["choices"][0]["message"]["content"] == "".join(SENTENCE)
    assert errors["bad"]["response"]["status_code"] == 400
    assert [each.id async for each in world.client.batches.list()] == [batch_id]
    assert all(request.is_job for request in world.backend.requests)
    assert outcomes(world) == {"completed": 20, "failed": 1, "cancelled": 0}


def outcomes(world: World) -> dict[str, int]:
    """What the newest jobs actor has counted of lines."""
    (actor, _), name = world.jobs[-1], "pagebus:jobs_total"
    lines = [line for line in render([actor.metrics.snapshot()]).splitlines() if line.startswith(name)]
    return {line.split('outcome="')[1].partition('"')[0]: int(float(line.split()[-1])) for line in lines}


async def test_a_batch_goes_on_where_it_was(world: World) -> None:
    """Another jobs actor computes what was not done, and joins what was under way; nothing twice, a torn line again."""
    world.backend.answers = False
    await world.begin(max_num_jobs=2)
    batch_id = await world.batch(await world.upload(*(ask(f"{i}") for i in range(6))))
    for count in (1, 3):
        await world.backend.requested(count)
        await world.backend._answer(world.backend.requests[count - 1])
    await world.backend.requested(4)
    await world.leave()
    partial = Store(world.folder, 1).partial(batch_id, "output")
    assert partial.read_text().count("\n") == 2
    with partial.open("a") as file:
        file.write('{"custom_id": "5", "resp')
    world.backend.answers = True
    await world.begin()
    batch = await world.ended(batch_id)
    assert (await world.lines(batch.output_file_id)).keys() == {f"{i}" for i in range(6)}
    assert batch.usage == usage_of(6), "what was done before counts too"
    asked = [request.request_id for request in world.backend.requests]
    assert (len(asked), len(set(asked))) == (8, 6), "the two that were under way are asked for again, and no others"


async def test_a_batch_that_another_actor_took_over_is_let_go(world: World) -> None:
    """The lease of the first one had expired, though it lives: both have computed the lines, one writes them."""
    world.backend.answers = False
    await world.begin(lease_ttl_s=0.3)
    batch_id = await world.batch(await world.upload(ask("a"), ask("b")))
    await world.backend.requested(2)
    await world.begin(lease_ttl_s=0.3)
    (first, _), (second, _) = world.jobs

    def taken_over() -> bool:
        world.server.leases.pop(first.names.lease("jobs", first.name), None)
        return second.window.jobs == 2

    await until(taken_over)
    await until(lambda: first.window.jobs == 0)
    for request in await world.backend.requested(4):
        await world.backend._answer(request)
    batch = await world.ended(batch_id)
    assert set(await world.lines(batch.output_file_id)) == {"a", "b"}
    assert batch.error_file_id is None


async def test_a_cancelled_batch_keeps_what_is_done(world: World) -> None:
    """Its other lines are listed as cancelled."""
    world.backend.answers = False
    await world.begin(max_num_jobs=2)
    batch_id = await world.batch(await world.upload(*(ask(f"{i}") for i in range(6))))
    await world.backend.requested(2)
    await world.backend._answer(world.backend.requests[0])
    await world.backend.requested(3)
    assert (await world.client.batches.cancel(batch_id)).status == "cancelling"
    batch = await world.ended(batch_id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    assert len(await world.lines(batch.output_file_id)) == 1
    errors = await world.lines(batch.error_file_id)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    assert len(errors) == 5
    await until(lambda: outcomes(world) == {"completed": 1, "failed": 0, "cancelled": 5})
    with pytest.raises(openai.ConflictError):
        await world.client.batches.cancel(batch_id)


async def test_a_batch_expires(world: World) -> None:
    """What is not done by then is listed as expired."""
    batch_id = await world.batch(await world.upload(ask("a")))
    files = Store(world.folder, 1)
    await until(lambda: files.find(batch_id) is not None)
    files.save({**(files.find(batch_id) or {}), "expires_at": 5})
    world.backend.answers = False
    await world.begin()
    batch = await world.ended(batch_id)
    assert batch.status == "expired"
    assert (await world.lines(batch.error_file_id))["a"]["error"]["code"] == "batch_expired"


async def test_a_wrong_file_fails(world: World) -> None:
    """Nothing is computed, and every line at fault is told."""
    await world.begin(max_batch_lines=3)
    other = {**ask("b"), "url": "/v1/completions"}
    batch = await world.ended(await world.batch(await world.upload(ask("a"), "{", other, ask("a"))))
    assert batch.status == "failed"
    assert batch.errors is not None
    codes = [(each.code, each.line) for each in batch.errors.data or []]
    assert codes == [("invalid_json_line", 2), ("mismatched_url", 3), ("duplicate_custom_id", 4), ("too_many_lines", 4)]
    deep = json.dumps(ask("d")).replace('"content": "d"', '"content": "d", "x": ' + "[" * 65 + "]" * 65)
    worker = world.jobs[0][0].parts.worker
    worker.max_line_bytes = 16 * len(deep)
    batch = await world.ended(await world.batch(await world.upload(deep, "x" * len(deep) * 48)))
    assert [(each.code, each.line) for each in batch.errors.data] == [("invalid_json_line", 1), ("line_too_long", 2)]
    assert "nested" in batch.errors.data[0].message
    batch = await world.ended(await world.batch(await world.upload("\n")))
    assert [each.code for each in batch.errors.data] == ["empty_file"]
    assert world.backend.requests == []


async def test_a_file_that_begins_with_a_byte_order_mark(world: World) -> None:
    """The mark is no part of the first line, nor of its length; a file with nothing else is empty."""
    await world.begin()
    text = json.dumps(ask("a"))
    world.jobs[0][0].parts.worker.max_line_bytes = len(text)
    batch = await world.ended(await world.batch(await world.upload("\ufeff" + text)))
    assert (batch.status, (await world.lines(batch.output_file_id)).keys()) == ("completed", {"a"})
    batch = await world.ended(await world.batch(await world.upload("\ufeff")))
    assert [each.code for each in batch.errors.data] == ["empty_file"]


async def test_a_file_that_goes_away(world: World) -> None:
    """Its batch fails with the answers that there are, and nothing else does."""
    batch_id, file_id = await half_done(world)
    await world.leave()
    await world.client.files.delete(file_id)
    world.backend.answers = True
    await world.begin()
    batch = await world.ended(batch_id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [each.code for each in batch.errors.data or []] == ["file_not_found"]
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 1
    assert (await world.lines(batch.output_file_id)).keys() == {"a"}
    assert list(world.folder.glob("*.partial")) == []
    other = await world.ended(await world.batch(await world.upload(ask("c"))))
    assert other.status == "completed"


async def half_done(world: World) -> tuple[str, str]:
    """Ids of a batch, of whose two lines one is answered, and of its file."""
    world.backend.answers = False
    await world.begin(max_num_jobs=1)
    file_id = await world.upload(ask("a"), ask("b"))
    batch_id = await world.batch(file_id)
    await world.backend.requested(1)
    await world.backend._answer(world.backend.requests[0])
    await world.backend.requested(2)
    return batch_id, file_id


async def test_a_file_that_goes_away_before_a_cancellation(world: World) -> None:
    """What is not done cannot be listed; what is done is not lost."""
    batch_id, file_id = await half_done(world)
    await world.client.files.delete(file_id)
    await world.client.batches.cancel(batch_id)
    batch = await world.ended(batch_id)
    assert (batch.status, batch.errors) == ("cancelled", None)
    assert (await world.lines(batch.output_file_id)).keys() == {"a"}


async def test_a_batch_that_is_given_up_keeps_what_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what ends its actors; the line that was not done is listed."""
    batch_id, _ = await half_done(world)
    await world.leave()
    monkeypatch.setattr("pagebus.web.jobs.actor.MAX_DELIVERIES", 1)
    await world.begin()
    batch = await world.ended(batch_id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [each.code for each in batch.errors.data or []] == ["given_up"]
    assert (await world.lines(batch.output_file_id)).keys() == {"a"}
    assert (await world.lines(batch.error_file_id))["b"]["error"]["code"] == "given_up"


async def test_a_cancelled_batch_that_is_interrupted_at_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file was made, there was no room for the next: all of it is made again, and no answer is lost."""
    add, tries = Store.add, itertools.count()

    def fails_once(*args: Any, **options: Any) -> Record:
        if next(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return add(*args, **options)

    batch_id, _ = await half_done(world)
    monkeypatch.setattr(Store, "add", fails_once)
    monkeypatch.setattr("pagebus.web.jobs.actor.DISK_RETRY_S", 0.01)
    await world.client.batches.cancel(batch_id)
    batch = await world.ended(batch_id)
    assert batch.status == "cancelled"
    assert (await world.lines(batch.output_file_id)).keys() == {"a"}
    assert (await world.lines(batch.error_file_id)).keys() == {"b"}
    files = [each.id async for each in world.client.files.list(purpose="batch_output")]
    assert set(files) == {batch.output_file_id, batch.error_file_id}


async def test_batches_that_are_refused(world: World) -> None:
    """Each with the field's name."""
    file_id = await world.upload(ask("a"))
    create = world.client.batches.create
    batch = await create(input_file_id=file_id, endpoint=URL, completion_window="24h")
    for options, param in (
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"input_file_id": new_id("file-")}, "input_file_id"),
        ({"input_file_id": batch.id}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"} | options)
        assert caught.value.body["param"] == param


async def test_batches_of_a_key(tmp_path: Path) -> None:
    """So many may be under way, however many are asked for at once; another key has its own, and one that ends makes
    room."""
    async with world_in(tmp_path, api_key=("one", "two"), max_batches=2) as world:
        mine, yours = (world.client.with_options(api_key=key) for key in ("one", "two"))
        inputs = [await each.files.create(file=("a", json.dumps(ask("a"))), purpose="batch") for each in (mine, yours)]

        def create(client: openai.AsyncOpenAI, file: openai.types.FileObject) -> Awaitable[openai.types.Batch]:
            return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")

        made = await asyncio.gather(*(create(mine, inputs[0]) for _ in range(5)), return_exceptions=True)
        refused = [each for each in made if isinstance(each, openai.RateLimitError)]
        assert [(each.body["reason"], each.response.headers["retry-after"]) for each in refused] == [
            ("too_many_requests", "60")
        ] * 3
        assert "batches" in refused[0].message
        await create(yours, inputs[1])
        await world.begin()
        world.client = mine
        for each in made:
            if isinstance(each, openai.types.Batch):
                assert (await world.ended(each.id)).status == "completed"
        await create(mine, inputs[0])


async def test_batches_of_two_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key has half of the window, however many batches it has; its weight is kept, and not shown."""
    monkeypatch.setattr("pagebus.web.jobs.actor.LOOK_S", 0.02)
    async with world_in(tmp_path, api_key=("one", "two")) as world:
        world.backend.answers = False
        await world.begin(max_num_jobs=4)
        window, answered = world.jobs[0][0].window, 0
        for batch, key in enumerate(("one", "one", "one", "two")):
            world.client = world.client.with_options(api_key=key)
            batch_id = await world.batch(await world.upload(*(ask(f"{batch}-{i}") for i in range(6))))
            await until(lambda: window.jobs == 4)
        while window._held != {"key 0": 2, "key 1": 2}:
            requests = await world.backend.requested(answered + 4)
            await world.backend._answer(requests[answered])
            answered += 1
        assert answered < 12, "long before the first key has nothing left"
        for _ in range(4):
            await world.backend._answer(requests[answered])
            answered += 1
            requests = await world.backend.requested(answered + 4)
        assert window._held == {"key 0": 2, "key 1": 2}
        record = Store(tmp_path, 1).find(batch_id)
        assert record is not None
        assert record["weight"] == 1.0
        assert "weight" not in (await world.client.batches.retrieve(batch_id)).model_dump()


async def test_jobs_beside_a_batch(world: World) -> None:
    """However many lines it has, jobs from the stream are taken between them."""
    world.backend.answers = False
    await world.begin(max_num_jobs=2)
    await world.batch(await world.upload(*(ask(f"{i}") for i in range(100))))
    await world.backend.requested(2)
    request = json.dumps(ask("job"))
    await world.backend.bus.publish([(world.jobs[0][0].names.jobs, Job(request=request)) for _ in range(3)])
    jobs: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        while len(jobs) < 3:
            for asked in list(world.backend.requests):
                await world.backend._answer(asked)
            await asyncio.sleep(0.01)
            jobs = [each.request_id for each in world.backend.requests if each.messages[0]["content"] == "job"]
    assert len(world.backend.requests) < 60


async def test_batches_that_are_over_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones, beyond so many; their files stay."""
    monkeypatch.setattr(files, "MAX_ENDED", 1)
    await world.begin()
    file_id = await world.upload(ask("a"))
    ended = []
    for _ in range(3):
        ended.append(await world.ended(await world.batch(file_id)))
        record = Store(world.folder, 1).find(ended[-1].id)
        assert record is not None
        older = {**record, "id": f"batch_{len(ended):024x}"}  # ids sort by age, to the second
        Store(world.folder, 1).save(older)
        Store(world.folder, 1).delete(record["id"])
    running = await world.batch(file_id)
    assert [each.id async for each in world.client.batches.list()] == [running, f"batch_{3:024x}"]
    assert await world.lines(ended[0].output_file_id)


async def test_a_jobs_actor_that_ends_while_it_reads_leaves_no_file_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest fails on the warning of a file that nobody closes."""
    is_reading, may_go_on, whole_lines = threading.Event(), threading.Event(), batches.whole_lines

    def wait(path: Path, tally: Tally) -> set[str]:
        is_reading.set()
        assert may_go_on.wait(LIMIT_S)
        return whole_lines(path, tally)

    monkeypatch.setattr(batches, "whole_lines", wait)
    await world.begin()
    await world.batch(await world.upload(ask("a")))
    await until(is_reading.is_set)
    actor, task = world.jobs.pop()
    task.cancel()
    await asyncio.wait([task])
    may_go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    await actor.bus.close()
    gc.collect()


async def test_a_full_disk_loses_no_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that could not be written is computed again once there is room."""
    add, tries = Progress.add, itertools.count()

    def fails_once(progress: Progress, result: Result) -> None:
        if next(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(progress, result)

    monkeypatch.setattr(Progress, "add", fails_once)
    monkeypatch.setattr("pagebus.web.jobs.actor.DISK_RETRY_S", 0.01)
    await world.begin()
    batch = await world.ended(await world.batch(await world.upload(*(ask(f"{i}") for i in range(4)))))
    assert batch.status == "completed"
    assert set(await world.lines(batch.output_file_id)) == {"0", "1", "2", "3"}
    assert batch.error_file_id is None
