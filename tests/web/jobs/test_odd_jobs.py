"""What other programs put into Redis and no jobs actor expects: it costs the job itself at most."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from pagebus.bus.messages import Job
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from pagebus.web.http.limits import BYTES_PER_BRACKET
from tests.helpers.waiting import until_empty
from tests.web.jobs.test_jobs_actor import World, line


@pytest.fixture
async def world(redis_url: str, redis_names: Names, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("pagebus.web.jobs.actor.LOOK_S", 0.02)
    made = World(lambda: RedisBus(redis_url, redis_names), redis_names)
    await made.bus.connect()
    await made.backend.start()
    yield made
    await made.end()


@pytest.mark.parametrize("odd", ["text", "stream", "name", "number"])
async def test_counters_that_are_none(world: World, redis_url: str, redis_names: Names, odd: str) -> None:
    """One job's batch is no hash, or has fields that are no counters: another batch is cancelled all the same."""
    world.backend.answers = False
    async with redis.asyncio.from_url(redis_url) as client:
        key = redis_names.batch("odd")
        if odd == "text":
            await client.set(key, "x")
        elif odd == "stream":
            await client.xadd(key, {"a": "b"})
        else:
            await client.hset(key, b"\xff" if odd == "name" else "cancel", 1 if odd == "name" else "9" * 5000)
    await world.begin()
    await world.push(Job(request=line("a"), batch="odd"), Job(request=line("b"), batch="good"))
    await world.backend.requested(2)
    await world.bus.count({redis_names.batch("good"): {"cancel": 1}}, ttl_s=60)
    assert (await world.results(1))["b"]["error"]["code"] == "batch_cancelled"
    for request in world.backend.requests:
        await world.backend._answer(request)
    assert (await world.results(1))["a"]["response"]["status_code"] == 200
    await until_empty(world.bus, world.names.jobs)


@pytest.mark.parametrize("what", ["bytes", "brackets"])
async def test_jobs_that_are_too_large_are_not_parsed(world: World, what: str) -> None:
    """They are answered with the limits of HTTP, whose bodies they could not be; parsing them might end the actor."""
    actor = await world.begin()
    most = actor.parts.worker.max_line_bytes
    text = "x" * (most + 1) if what == "bytes" else "[" * (most // BYTES_PER_BRACKET + 1)
    await world.push(Job(request=text, batch="night"), Job(request=line("next")))
    results = await world.results(2)
    assert results.pop("next")["response"]["status_code"] == 200
    (error,) = (each["error"] for each in results.values())
    assert (error["code"], what.removeprefix("brackets") in error["message"]) == ("invalid_job", True)
    assert "at most" in error["message"]
    assert await world.bus.counters(world.names.batch("night")) == [{"failed": 1}]
    await until_empty(world.bus, world.names.jobs)
