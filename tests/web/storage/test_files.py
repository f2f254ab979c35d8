"""Files over HTTP: what is kept, shown and refused, and how much of it."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.storage import files as store
from pagebus.web.storage.files import Store
from tests.helpers.waiting import LIMIT_S
from tests.web.batch_world import URL, World, world_in
from tests.web.fake_backend import start_served


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


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_files_are_deleted_page_by_page(world: World, order: Literal["asc", "desc"]) -> None:
    """A page goes on behind the last one, whose files are gone by then; what is no id is refused."""
    files = world.client.files
    for _ in range(5):
        await files.create(file=("a", b"x"), purpose="user_data")
    async for each in files.list(limit=2, order=order):
        await files.delete(each.id)
    assert [each async for each in files.list()] == []
    with pytest.raises(openai.BadRequestError, match="after"):
        await files.list(after="file-5")


async def test_what_is_refused(world: World) -> None:
    """Forms that are none, fields that nobody knows, purposes that are none; a name that is no UTF-8 is not."""
    with pytest.raises(openai.BadRequestError):
        await world.client.files.create(file=("a", b"x"), purpose="pleasure")
    with pytest.raises(openai.NotFoundError):
        await world.client.files.retrieve("file-../../etc/passwd")
    async with httpx.AsyncClient(timeout=LIMIT_S) as plain:
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


async def test_a_full_disk_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files that have used up their room are; a record that could not be written leaves nothing behind."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pagebus.web.storage.files.os.fsync", fail)
    with pytest.raises(openai.APIStatusError) as caught:
        await world.client.files.create(file=("a", b"x"), purpose="user_data")
    assert (caught.value.status_code, caught.value.body["reason"]) == (507, "no_room")  # type: ignore[index]
    assert not list(world.folder.iterdir())


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
        assert (caught.value.code, caught.value.body["reason"]) == ("429", "insufficient_quota")
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


def test_a_folder_that_cannot_be_had(tmp_path: Path) -> None:
    """Ends an actor with the setting, the path and the reason; another try would not help."""
    (file := tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=f"^--files-dir {file}/in: Not a directory$"):
        store.open_store(Settings(files_dir=str(file / "in")))
