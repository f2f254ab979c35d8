"""Reads of groups that wait on the server, and what may happen to them there."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.bus.contract import BusUnavailable
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.redis.link import RedisLink
from tests.bus.entries import abort, request_ids
from tests.helpers.waiting import eventually


async def until_blocked(raw: RedisLink) -> None:
    """Wait until some client's read waits on the server."""

    async def waits() -> bool:
        return b"blocked_clients:0" not in (await raw.call(("INFO", "clients")))[0]

    await eventually(waits, look_s=0)


async def test_lost_answer_of_a_group_read(server_bus: RedisBus, raw: RedisLink) -> None:
    """Entries whose delivery was cut off come again, as if for the first time; those already handed out do not."""
    await server_bus.publish([("s", abort(1)), ("s", abort(2))])
    assert request_ids(await server_bus.read_group("g", "a", ["s"], count=1, block_ms=0)) == ["r1"]
    # What a reader does whose connection then breaks: the server has delivered r2 to "a", nobody has seen it.
    await raw.call(("XREADGROUP", "GROUP", "g", "a", "STREAMS", "s", ">"))
    reading = asyncio.create_task(server_bus.read_group("g", "a", ["s"], block_ms=60_000))
    await until_blocked(raw)
    await raw.call(("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
    with pytest.raises(BusUnavailable):
        await reading
    entries = await server_bus.read_group("g", "a", ["s"], block_ms=0)
    assert request_ids(entries) == ["r2"]
    assert entries[0].deliveries == 1


async def test_a_stream_is_deleted_under_a_group_read(server_bus: RedisBus, raw: RedisLink) -> None:
    """By an eviction or FLUSHDB: the read makes the stream and its group anew, and waits on."""
    reading = asyncio.create_task(server_bus.read_group("g", "a", ["s"], block_ms=60_000))
    await until_blocked(raw)
    await raw.call(("DEL", "s"))
    await server_bus.publish([("s", abort(1))])
    assert request_ids(await reading) == ["r1"]
