"""A bus on a server of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pagebus.bus.private_redis.server import PrivateRedis
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.redis.link import RedisLink
from pagebus.bus.redis.url import parse_redis_url
from tests.helpers.waiting import LIMIT_S


@pytest.fixture
async def server_bus(private_redis: PrivateRedis) -> AsyncIterator[RedisBus]:
    """A bus on a server that the test may mistreat."""
    bus = RedisBus(private_redis.url, connect_timeout_s=LIMIT_S, command_timeout_s=LIMIT_S)
    await bus.connect()
    yield bus
    await bus.close()


@pytest.fixture
async def raw(private_redis: PrivateRedis) -> AsyncIterator[RedisLink]:
    """Plain commands to that server."""
    link = RedisLink(parse_redis_url(private_redis.url), "test")
    yield link
    await link.close()
