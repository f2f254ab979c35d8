"""Entries that a consumer group has handed out and that are pending for nobody are handed out again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from pagebus.bus.messages import AbortRequest
from pagebus.bus.private_redis.server import PrivateRedis, find_redis_server
from pagebus.bus.redis import strays
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.bus.entries import GROUP, publish, read_new, request_ids
from tests.bus.test_restarts import restart
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH")
STREAM = "work"


@pytest.fixture
async def raw(private_redis: PrivateRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of the same server."""
    client = redis.asyncio.from_url(private_redis.url)
    yield client
    await client.aclose()


@pytest.mark.parametrize("counted", [strays.UNREAD, 2])
async def test_acked_but_not_deleted(
    private_redis: PrivateRedis, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    """Whoever looks first gets them once, as delivered before, page by page; not what is pending or was never read."""
    monkeypatch.setattr(strays, "PAGE", 3)
    monkeypatch.setattr(strays, "UNREAD", counted)  # three were never read: too many to count, the second time
    bus, late = RedisBus(private_redis.url, Names("pagebus")), RedisBus(private_redis.url, Names("pagebus"))
    await bus.create_group(STREAM, GROUP)
    await publish(bus, STREAM, *range(20))
    entries = await read_new(bus, STREAM, count=17)
    left = [2, 3, 4, 9, 16]
    await raw.xack(STREAM, GROUP, *(str(entries[number].id) for number in left))
    await raw.xdel(STREAM, *(str(entries[number].id) for number in (5, 6, 7, 8)))  # pending, but gone

    found = await read_new(late, STREAM, "b")
    assert request_ids(found) == [f"r{number}" for number in left]
    assert {entry.deliveries for entry in found} == {2}
    assert request_ids(await read_new(late, STREAM, "b")) == ["r17", "r18", "r19"]
    await late.ack(GROUP, found)
    assert await bus.length(STREAM) == 20 - 4 - len(left)
    await bus.close()
    await late.close()


async def test_what_is_pending_is_not_sent_where_nothing_is_stray(
    private_redis: PrivateRedis, raw: redis.asyncio.Redis
) -> None:
    """Others have been given much of it, and some of it nobody yet."""
    bus, late = RedisBus(private_redis.url, Names("pagebus")), RedisBus(private_redis.url, Names("pagebus"))
    await bus.create_group(STREAM, GROUP)
    long = "x" * 1000
    await bus.publish([(STREAM, AbortRequest(request_id=f"r{number}", reason=long)) for number in range(100)])
    entries = await read_new(bus, STREAM, count=100)
    await bus.ack(GROUP, entries[10:20])
    await publish(bus, STREAM, 100)
    before = (await raw.info("stats"))["total_net_output_bytes"]
    assert request_ids(await read_new(late, STREAM, "b")) == ["r100"]
    sent = (await raw.info("stats"))["total_net_output_bytes"] - before
    assert sent < (len(entries) - 10) * len(long)
    await bus.close()
    await late.close()


async def test_a_server_that_takes_what_was_read_for_unread(
    private_redis: PrivateRedis, raw: redis.asyncio.Redis
) -> None:
    """Redis 7.0 forgets what groups have read since its file was rewritten: their lag is no measure."""
    bus, late = RedisBus(private_redis.url, Names("pagebus")), RedisBus(private_redis.url, Names("pagebus"))
    await bus.create_group(STREAM, GROUP)
    await publish(bus, STREAM, 0)
    await bus.ack(GROUP, await read_new(bus, STREAM))
    await raw.bgrewriteaof()

    async def is_rewritten() -> bool:
        return not (await raw.info("persistence"))["aof_rewrite_in_progress"]

    await eventually(is_rewritten)
    await publish(bus, STREAM, 1, 2, 3)
    entries = await read_new(bus, STREAM)
    await raw.xack(STREAM, GROUP, str(entries[1].id))
    await bus.close()
    await restart(private_redis)

    assert request_ids(await read_new(late, STREAM)) == ["r2", "r1", "r3"]
    await late.close()


async def test_a_read_that_strays_fill_is_not_the_last_look(
    private_redis: PrivateRedis, raw: redis.asyncio.Redis
) -> None:
    """What its consumer had been given by then is behind them: the next read finds it."""
    bus, late = RedisBus(private_redis.url, Names("pagebus")), RedisBus(private_redis.url, Names("pagebus"))
    await bus.create_group(STREAM, GROUP)
    await publish(bus, STREAM, *range(6))
    entries = await read_new(bus, STREAM, count=5)
    await raw.xack(STREAM, GROUP, *(str(entry.id) for entry in entries[:3]))

    assert request_ids(await read_new(late, STREAM, count=3)) == ["r0", "r1", "r2"]
    assert request_ids(await read_new(late, STREAM, count=3)) == ["r3", "r4"]
    assert request_ids(await read_new(late, STREAM, count=3)) == ["r5"]
    await bus.close()
    await late.close()


async def test_what_a_server_made_of_half_a_transaction(private_redis: PrivateRedis, raw: redis.asyncio.Redis) -> None:
    """Its file ends within one: at the next start but one, the entry is there, behind what was read."""
    first, second, third = (RedisBus(private_redis.url, Names("pagebus")) for _ in range(3))
    await first.create_group(STREAM, GROUP)
    async with raw.pipeline(transaction=True) as pipeline:
        frame = {"h": '{"t":"AbortRequest","v":1,"request_id":"r1"}'}
        await pipeline.xadd(STREAM, frame).set("last", "of the transaction").execute()
    await first.close()
    await restart(private_redis, lose=20)
    assert await second.length(STREAM) == 0
    await publish(second, STREAM, 2)
    await second.ack(GROUP, await read_new(second, STREAM))
    await second.close()
    await restart(private_redis)

    found = await read_new(third, STREAM)
    await third.ack(GROUP, found)
    assert request_ids(found) in ([], ["r1"])  # a server that leaves out the half leaves nothing
    assert await third.length(STREAM) == 0
    await third.close()
