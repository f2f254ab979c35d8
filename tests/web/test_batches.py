"""Files and batches over HTTP, spoken to by OpenAI's own client, with the jobs actor behind them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_backend import CACHED_TOKENS, MODEL, SENTENCE, FakeBackend, Served, start_served, until
from openai.types.batch_usage import BatchUsage, InputTokensDetails, OutputTokensDetails

from actors.settings import Settings
from bus.memory_bus import MemoryBus
from bus.memory_server import MemoryServer
from bus.messages import Job
from web.files import store
from web.files.store import Store, new_id
from web.jobs.actor import JobsActor

URL = "/v1/chat/completions"


class World:
    """An ingress, a jobs actor and a store that they share."""

    def __init__(self, folder: Path, served: Served, server: MemoryServer) -> None:
        self.folder, self.served, self.server = folder, served, server
        self.client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
        self.jobs: list[tuple[JobsActor, asyncio.Task[None]]] = []

    @property
    def backend(self) -> FakeBackend:
        return self.served.backend

    async def begin(self, **settings: Any) -> None:
        """Start a jobs actor."""
        options = {"files_dir": str(self.folder), "lease_ttl_s": 60.0} | settings
        actor = JobsActor(Settings(**options), MemoryBus(self.server), f"jobs-{len(self.jobs)}", model=MODEL)
        self.jobs.append((actor, asyncio.create_task(actor.run())))
        await until(lambda: actor.state == "ready")

    async def leave(self) -> None:
        """Drain the jobs actors: whoever comes next goes on."""
        for actor, task in self.jobs:
            actor.request_drain()
            await task
            await actor.bus.close()
        self.jobs.clear()

    async def upload(self, *lines: dict[str, Any] | str) -> str:
        text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
        return (await self.client.files.create(file=("in.jsonl", text.encode()), purpose="batch")).id

    async def batch(self, file_id: str, **options: Any) -> str:
        options = {"endpoint": URL, "completion_window": "24h"} | options
        return (await self.client.batches.create(input_file_id=file_id, **options)).id

    async def ended(self, batch_id: str) -> openai.types.Batch:
        """Wait for the end of a batch."""
        async with asyncio.timeout(20):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                if batch.status in ("failed", "completed", "expired", "cancelled"):
                    return batch
                await asyncio.sleep(0.02)

    async def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """The lines of an output file, by custom id."""
        if file_id is None:
            return {}
        text = (await self.client.files.content(file_id)).text
        lines = [json.loads(line) for line in text.splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


def ask(custom_id: str, **body: Any) -> dict[str, Any]:
    question = {"messages": [{"role": "user", "content": custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": question}


def usage_of(count: int) -> BatchUsage:
    """What so many answers to :func:`ask` come to."""
    cached, prompt, output = CACHED_TOKENS * count, 2 * count, len(SENTENCE) * count
    return BatchUsage(
        input_tokens=prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=cached),
        output_tokens=output,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=prompt + output,
    )


@asynccontextmanager
async def world_in(folder: Path, **settings: Any) -> AsyncIterator[World]:
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), files_dir=str(folder), **settings)
    world = World(folder, served, server)
    try:
        yield world
    finally:
        await world.client.close()
        await world.leave()
        await served.stop()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_in(tmp_path) as made:
        yield made


async def test_a_file_comes_and_goes(world: World) -> None:
    """Uploaded, listed, shown, read back to the byte, deleted."""
    data = bytes(range(256)) * 3000
    files = world.client.files
    first = await files.create(file=("a.bin", data), purpose="user_data")
    second = await files.create(file=("b.jsonl", b"{}"), purpose="batch", expires_after={
        "anchor": "created_at", "seconds": 3600})  # fmt: skip
    assert (first.bytes, first.filename, first.purpose, first.status) == (len(data), "a.bin", "user_data", "processed")
    assert second.expires_at == second.created_at + 3600
    assert {each.id async for each in files.list()} == {first.id, second.id}
    assert [each.id async for each in files.list(purpose="batch")] == [second.id]
    assert len([each async for each in files.list(limit=1)]) == 2, "pages follow one another"
    assert (await files.retrieve(first.id)) == first
    assert (await files.content(first.id)).content == data
    assert (await files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await files.content(first.id)


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
    with pytest.raises(openai.ConflictError):
        await world.client.batches.cancel(batch_id)


async def test_a_batch_expires(world: World) -> None:
    """What is not done by then is listed as expired."""
    batch_id = await world.batch(await world.upload(ask("a")))
    store = Store(world.folder, 1)
    await until(lambda: store.find(batch_id) is not None)
    store.save({**(store.find(batch_id) or {}), "expires_at": 5})
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
    worker = world.jobs[0][0].worker
    worker.max_line_bytes = len(deep) + 1
    batch = await world.ended(await world.batch(await world.upload(deep, "x" * len(deep) * 3)))
    assert [(each.code, each.line) for each in batch.errors.data] == [("invalid_json_line", 1), ("line_too_long", 2)]
    assert "nested" in batch.errors.data[0].message
    batch = await world.ended(await world.batch(await world.upload("\n")))
    assert [each.code for each in batch.errors.data] == ["empty_file"]
    assert world.backend.requests == []


async def test_a_file_that_goes_away(world: World) -> None:
    """Its batch fails, and nothing else does."""
    world.backend.answers = False
    await world.begin(max_num_jobs=1)
    file_id = await world.upload(ask("a"), ask("b"))
    batch_id = await world.batch(file_id)
    await world.backend.requested(1)
    await world.leave()
    await world.client.files.delete(file_id)
    world.backend.answers = True
    await world.begin()
    batch = await world.ended(batch_id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [each.code for each in batch.errors.data or []] == ["file_not_found"]
    other = await world.ended(await world.batch(await world.upload(ask("c"))))
    assert other.status == "completed"


async def test_what_is_refused(world: World) -> None:
    """Each with the field's name."""
    file_id = await world.upload(ask("a"))
    create = world.client.batches.create
    for options, param in (
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"input_file_id": new_id("file-")}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"} | options)
        assert caught.value.body["param"] == param
    with pytest.raises(openai.BadRequestError):
        await world.client.files.create(file=("a", b"x"), purpose="pleasure")
    with pytest.raises(openai.NotFoundError):
        await world.client.files.retrieve("file-../../etc/passwd")
    async with httpx.AsyncClient() as plain:
        answer = await plain.post(f"{world.served.url}/v1/files", content=b"x", headers={"content-type": "text/plain"})
        assert answer.status_code == 415
        form = {"content-type": "multipart/form-data; boundary=b"}
        for head in (b'\xef\xbb\xbf name="file"', b"form-data; name", b'form-data; name="\xff"', b"form-data"):
            body = b"--b\r\nContent-Disposition: %s\r\n\r\nx\r\n--b--\r\n" % head
            answer = await plain.post(f"{world.served.url}/v1/files", content=body, headers=form)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]
        parts = (b'name="file"; filename="\xff.txt"', b"x"), (b'name="purpose"', b"vision")
        lines = [b"--b\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % part for part in parts]
        body = b"".join(lines) + b"--b--\r\n"
        answer = await plain.post(f"{world.served.url}/v1/files", content=body, headers=form)
        assert (answer.status_code, answer.json()["filename"]) == (200, "?.txt")
        many = b"".join(b'--b\r\nContent-Disposition: form-data; name="a%d"\r\n\r\nx\r\n' % i for i in range(100))
        answer = await plain.post(f"{world.served.url}/v1/files", content=many, headers=form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "a0"), "refused before others are read"


async def test_limits(tmp_path: Path) -> None:
    """Of one file, and of all."""
    async with world_in(tmp_path, max_file_bytes=1000, max_files_bytes=1500) as world:
        create = world.client.files.create
        with pytest.raises(openai.APIStatusError) as caught:
            await create(file=("a", b"x" * 1001), purpose="user_data")
        assert caught.value.status_code == 413
        await create(file=("a", b"x" * 1000), purpose="user_data")
        with (tmp_path / "elsewhere.part").open("wb") as other:  # what another ingress is being sent counts too
            other.write(b"x" * 400)
        with pytest.raises(openai.APIStatusError) as caught:
            await create(file=("a", b"x" * 101), purpose="user_data")
        assert caught.value.status_code == 507
        os.utime(tmp_path / "elsewhere.part", (0, 0))  # unless that has died
        assert Store(tmp_path, 1).num_bytes() == 1000
        await create(file=("a", b"x" * 500), purpose="user_data")
        assert Store(tmp_path, 1).num_bytes() == 1500
        assert not list(tmp_path.glob("*.part"))  # noqa: ASYNC240


def test_no_room_for_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes stay what they were, so that nothing is lost that can be tried again, and nothing is left over."""
    kept = Store(tmp_path, 1)
    beside = kept.partial("batch_1", "output")
    beside.write_bytes(b"x")

    def fail(record: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept, "save", fail)
    with pytest.raises(OSError, match="space"):
        kept.add(beside, "out.jsonl", "batch_output", "", None)

    assert list(tmp_path.iterdir()) == [beside]


async def test_very_many_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones count too."""
    monkeypatch.setattr(store, "MAX_FILES", 2)
    create = world.client.files.create
    files = [await create(file=("a", b""), purpose="user_data") for _ in range(2)]
    with pytest.raises(openai.APIStatusError) as caught:
        await create(file=("a", b""), purpose="user_data")
    assert caught.value.status_code == 507
    await world.client.files.delete(files[0].id)
    await create(file=("a", b""), purpose="user_data")


async def test_files_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key has half of what other keys leave, of bytes and of files, those on their way too. Then it gets a 429, which
    clients do not repeat, until it has deleted some or their time is over."""
    async with world_in(tmp_path, api_key=("one", "two"), max_files_bytes=1000) as world:
        mine, yours = (world.client.with_options(api_key=key, max_retries=2) for key in ("one", "two"))

        async def upload(client: openai.AsyncOpenAI, size: int, **options: Any) -> str:
            return (await client.files.create(file=("a", b"x" * size), purpose="user_data", **options)).id

        hour = {"expires_after": {"anchor": "created_at", "seconds": 3600}}
        short_lived = await upload(mine, 400, **hour)
        with pytest.raises(openai.RateLimitError, match="share of bytes of files: at most 500") as caught:
            await upload(mine, 101)
        assert caught.value.code == "insufficient_quota"
        assert caught.value.response.headers["x-should-retry"] == "false"
        (tmp_path / f"elsewhere.{store.tag_of('key 1')}.part").write_bytes(b"x" * 100)
        with pytest.raises(openai.RateLimitError, match="at most 300"):
            await upload(yours, 201)
        await upload(yours, 200)
        with pytest.raises(openai.RateLimitError, match="at most 350"):
            await upload(mine, 1)
        record = Store(tmp_path, 1).find(short_lived)
        assert record is not None
        world.served.actor.context.store._known[short_lived] = store.Known(store.tag_of("key 0"), 5)
        await upload(mine, 350)
        assert Store(tmp_path, 1).find(short_lived) is None
        monkeypatch.setattr(store, "MAX_FILES", 5)
        with pytest.raises(openai.RateLimitError, match="share of files: at most 2"):
            await upload(yours, 0)


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
        assert [(each.code, each.response.headers["retry-after"]) for each in refused] == [
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
    monkeypatch.setattr("web.jobs.actor.LOOK_S", 0.02)
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
    async with asyncio.timeout(20):
        while len(jobs) < 3:
            for asked in list(world.backend.requests):
                await world.backend._answer(asked)
            await asyncio.sleep(0.01)
            jobs = [each.request_id for each in world.backend.requests if each.messages[0]["content"] == "job"]
    assert len(world.backend.requests) < 60


async def test_batches_that_are_over_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones, beyond so many; their files stay."""
    monkeypatch.setattr(store, "MAX_ENDED", 1)
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


async def test_keys_see_their_own_only(tmp_path: Path) -> None:
    """A file or batch of another key is not there."""
    async with world_in(tmp_path, api_key=("one", "two")) as world:
        mine, yours = (world.client.with_options(api_key=key) for key in ("one", "two"))
        file = await mine.files.create(file=("a", b"x"), purpose="batch")
        assert [each.id async for each in mine.files.list()] == [file.id]
        assert [each.id async for each in yours.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await yours.files.content(file.id)
        with pytest.raises(openai.BadRequestError):
            await yours.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")


async def test_without_a_folder() -> None:
    """A server that keeps no files says so."""
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server))
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="--files-dir"):
            await client.files.list()
    await served.stop()
