"""What the bus tests share. ``redis_url``, ``redis_names`` and ``private_redis`` come from
tests/helpers/redis_fixture.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pagebus.bus.contract import Bus
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.redis.link import RedisLink
from pagebus.bus.redis.url import parse_redis_url
from pagebus.bus.streams import Names
from tests.bus.entries import OpenBus


@pytest.fixture(params=["memory", "redis"])
async def open_bus(request: pytest.FixtureRequest) -> AsyncIterator[OpenBus]:
    """Opens further buses (one per actor) on one server, in-memory and on Redis in turn; closes them all."""
    opened: list[Bus] = []
    if request.param == "memory":
        server, names = MemoryServer(), Names()
    else:
        url, names = f"{request.getfixturevalue('redis_url')}?db=1", request.getfixturevalue("redis_names")
        link = RedisLink(parse_redis_url(url), "test")
        await link.call(("FLUSHDB",))
        await link.close()

    def open_one() -> Bus:
        bus: Bus = MemoryBus(server, names) if request.param == "memory" else RedisBus(url, names)
        opened.append(bus)
        return bus

    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(open_bus: OpenBus) -> Bus:
    """One connected bus."""
    one = open_bus()
    await one.connect()
    return one
