"""Several clients read one stream, each at an ingress of its own: all to its end, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.chaos.load import Answer, Broken, Job, Load
from tests.helpers.waiting import eventually
from tests.system.ingresses import Deployed, deployed

pytestmark = pytest.mark.share(4)

HEADERS = {"Idempotency-Key": "read by many"}
COMPLETION = Job(
    "/v1/completions",
    {"model": "oracle", "prompt": "a lazy dog", "max_tokens": 200, "temperature": 1.0, "seed": 3, "ignore_eos": True},
)
CHAT = Job(
    "/v1/chat/completions",
    {
        "model": "oracle",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 120,
        "temperature": 0,
        "ignore_eos": True,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    },
)
ECHO = Job("/v1/completions", {**COMPLETION.body, "echo": True, "logprobs": 1, "max_tokens": 100, "n": 2})


@asynccontextmanager
async def over(bus: str, redis_url: str, folder: Path, **settings: Any) -> AsyncIterator[Deployed]:
    """A deployment over this kind of bus."""
    server, names = MemoryServer(), Names("pagebus")
    open_bus = (lambda _: MemoryBus(server)) if bus == "memory" else (lambda kind: RedisBus(redis_url, names))
    async with deployed(folder, open_bus, **settings) as deployment:
        yield deployment


class Reader(Load):
    """A client that asks once, and says when it has the first few events. ``leaves``: it reads no more then, until it
    is told to."""

    def __init__(self, url: str, *, leaves: bool = False) -> None:
        super().__init__(url, [])
        self.reads = asyncio.Event()
        self.answer = Answer()
        self.leaves = leaves

    async def begin(self, job: Job, *, streamed: bool = True) -> asyncio.Task[Answer]:
        """Read in a task of its own. A stream has begun by then."""
        reading = asyncio.create_task(self.read(job, streamed=streamed))
        begun = asyncio.create_task(self.reads.wait())
        if streamed:
            await asyncio.wait([reading, begun], return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        begun.cancel()
        return reading

    async def read(self, job: Job, *, streamed: bool = True) -> Answer:
        """All that there is to this one, without coming back."""
        async with self.session() as session:
            assert await self._try(session, job, self.answer, HEADERS["Idempotency-Key"], streamed), "it was refused"
        return self.answer

    def heard(self, answer: Answer) -> None:
        if len(answer.times_s) >= 5:
            self.reads.set()
            if self.leaves:
                raise Broken("it leaves")


async def alone(url: str, job: Job) -> Answer:
    """What a client gets whom nobody disturbs."""
    async with Load(url, []).session() as session:
        return await Load(url, []).ask(session, job, key=None, streamed=True)


def longer(job: Job) -> Job:
    """So long that it does not end before anybody has done something about it."""
    return Job(job.path, {**job.body, "max_tokens": 900})


async def until_nothing_is_left(deployment: Deployed) -> None:
    async def clean() -> bool:
        return not any(deployment.scheduler.core.leftovers().values())

    await eventually(clean)


@pytest.mark.parametrize("bus", ["redis", "memory"])
@pytest.mark.parametrize("job", [COMPLETION, CHAT, ECHO], ids=["completion", "chat", "echo"])
async def test_who_joins_late_disturbs_nobody(tmp_path: Path, redis_url: str, bus: str, job: Job) -> None:
    """At three ingresses, one after the other, the last for the whole answer: each gets all of it, once, over the one
    connection it has, and is told the same usage."""
    async with over(bus, redis_url, tmp_path, ingresses=3) as deployment:
        whole = await alone(deployment.urls[0], job)
        *streamed, last = (Reader(url) for url in deployment.urls)
        reading = [await reader.begin(job) for reader in streamed] + [await last.begin(job, streamed=False)]
        answers = await asyncio.gather(*reading)
        await until_nothing_is_left(deployment)
    assert [answer.told() for answer in answers] == [whole.told()] * 3


@pytest.mark.parametrize("killed", ["older", "newer"])
async def test_one_of_two_ingresses_is_killed(tmp_path: Path, redis_url: str, killed: str) -> None:
    """Who reads at the other one reads on; whose connection broke gets the rest there."""
    job = longer(COMPLETION)
    async with over("redis", redis_url, tmp_path, lease_ttl_s=1.0) as deployment:
        whole = await alone(deployment.urls[0], job)
        older, newer = (Reader(url) for url in deployment.urls)
        reading = [await reader.begin(job) for reader in (older, newer)]
        place = 0 if killed == "older" else 1
        broken, other = (older, newer)[place], (newer, older)[place]
        await deployment.kill(deployment.ingresses[place])
        with pytest.raises((Broken, aiohttp.ClientError)):
            await reading[place]
        broken.url = other.url
        answers = await asyncio.gather(broken.read(job), reading[1 - place])
        await until_nothing_is_left(deployment)
    assert [answer.told() for answer in answers] == [whole.told()] * 2


async def test_the_last_to_leave_ends_it(tmp_path: Path, redis_url: str) -> None:
    """Not the first; and when both have left, it is given up."""
    job = longer(COMPLETION)
    async with over("redis", redis_url, tmp_path, resume_timeout_s=0.0) as deployment:
        core = deployment.scheduler.core
        first, last = (Reader(url, leaves=leaves) for url, leaves in zip(deployment.urls, (True, False), strict=True))
        reading = await last.begin(job)
        with pytest.raises(Broken):
            await first.read(job)

        async def has_left() -> bool:
            return all(len(list(request.readers)) == 1 for request in core.requests.values())

        await eventually(has_left)
        (request,) = core.requests.values()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until_nothing_is_left(deployment)
        assert request.aborted
