"""Answers of Redis, held back or to nothing, on a connection that many calls share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagebus.bus.redis.link import RedisLink
from pagebus.bus.redis.url import parse_redis_url
from tests.helpers.waiting import until


class Holding:
    """Between a link and its server: answers are held back while ``passes`` is cleared."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.passes = asyncio.Event()
        self.passes.set()
        self.seen = asyncio.Queue[bytes]()
        self.to_client: asyncio.StreamWriter

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, upstream = await asyncio.open_unix_connection(self._server)
        self.to_client = writer

        async def answer() -> None:
            while data := await answers.read(2**16):
                await self.passes.wait()
                writer.write(data)

        answering = asyncio.create_task(answer())
        while data := await reader.read(2**16):
            upstream.write(data)
            self.seen.put_nowait(data)
        upstream.close()
        await answering
        writer.close()


@pytest.fixture
async def holding(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[Holding, RedisLink]]:
    """A link whose answers can be held back."""
    between = Holding(redis_url.removeprefix("unix://").partition("?")[0])
    server = await asyncio.start_unix_server(between.serve, tmp_path / "s")
    link = RedisLink(parse_redis_url(f"unix://{tmp_path / 's'}"), "test")
    await link.call(("PING",))
    while not between.seen.empty():
        between.seen.get_nowait()
    yield between, link
    await link.close()
    server.close()
    await server.wait_closed()


async def test_calls_do_not_wait_for_the_answers_of_others(holding: tuple[Holding, RedisLink]) -> None:
    """What is sent later reaches the server at once, and is answered in its turn."""
    between, link = holding
    between.passes.clear()
    first = link.submit([("ECHO", "one")])
    assert b"one" in await between.seen.get()
    second = link.submit([("ECHO", "two"), ("ECHO", "three")])
    assert b"three" in await between.seen.get()
    assert not first.done()
    between.passes.set()
    assert [await first, await second] == [[b"one"], [b"two", b"three"]]


async def test_answers_to_nothing_end_the_connection(holding: tuple[Holding, RedisLink]) -> None:
    """From then on nobody could tell whose an answer is."""
    between, link = holding
    for junk in (b"+OK\r\n", b"\0\0\r\n"):
        between.to_client.write(junk)
        await until(lambda: link._stream is None)
        assert await link.call(("ECHO", "mine")) == [b"mine"]
