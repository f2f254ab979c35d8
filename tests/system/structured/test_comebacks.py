"""Structured streams that are interrupted, one alone in its batch: the client comes back at the other ingress, Redis
dies. The rest is what it would have been, and so is what is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.chaos.load import Answer, Broken, Job, Load
from tests.chaos.servers import OneServer
from tests.chaos.structured import OUTPUTS
from tests.helpers.waiting import LIMIT_S
from tests.system.ingresses import deployed

pytestmark = pytest.mark.share(6)

NAMES = ("schema", "regex", "grammar", "array", "choice", "object", "words")


def job(wanted: dict[str, Any], **more: Any) -> Job:
    body = {"model": "oracle", "prompt": "a lazy dog", "max_tokens": 90, "temperature": 1.0, "seed": 3}
    return Job("/v1/completions", {**body, **wanted, **more})


class Interrupted(Load):
    """Its streams are cut behind every third event that has an id, and taken up again at the next of ``urls``."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(urls[0], [])
        self.urls, self.cuts, self.ids = urls, 0, [""]

    def heard(self, answer: Answer) -> None:
        if answer.last_id == self.ids[-1]:
            return
        self.ids.append(answer.last_id)
        if len(self.ids) % 3 == 0:
            self.cuts += 1
            self.url = self.urls[self.cuts % len(self.urls)]
            raise Broken


@pytest.mark.parametrize("wanted", OUTPUTS, ids=NAMES)
async def test_clients_come_back_at_the_other_ingress(tmp_path: Path, wanted: dict[str, Any]) -> None:
    """Again and again."""
    server = MemoryServer()
    async with deployed(tmp_path, lambda _: MemoryBus(server)) as deployment:
        urls = deployment.urls
        cut = Interrupted(urls)
        async with cut.session() as session:
            whole = await Load(urls[0], []).ask(session, job(wanted), key=None, streamed=True)
            async with asyncio.timeout(LIMIT_S):
                answer = await cut.ask(session, job(wanted), key="come back", streamed=True)

    assert cut.cuts
    assert answer.told() == whole.told()


class Killing(Load):
    """Redis dies behind the tenth event of a stream, and starts again with its file."""

    def __init__(self, url: str, servers: OneServer) -> None:
        super().__init__(url, [])
        self.servers = servers

    def heard(self, answer: Answer) -> None:
        if len(answer.times_s) == 10:
            self.servers.server.kill()
            self.servers.server.start()


@pytest.mark.parametrize("wanted", OUTPUTS[:4], ids=NAMES[:4])
async def test_redis_is_killed_once(tmp_path: Path, wanted: dict[str, Any]) -> None:
    """The stream goes on over the same connection."""
    servers = OneServer()
    try:
        async with deployed(
            tmp_path, lambda kind: RedisBus(servers.url, Names("pagebus"), client_name=kind)
        ) as deployment:
            urls = deployment.urls
            load = Killing(urls[0], servers)
            async with load.session() as session:
                whole = await Load(urls[0], []).ask(session, job(wanted), key=None, streamed=True)
                async with asyncio.timeout(LIMIT_S):
                    answer = await load.ask(session, job(wanted), key=None, streamed=True)
    finally:
        servers.destroy()

    assert len(answer.times_s) > 10
    assert answer.told() == whole.told()
