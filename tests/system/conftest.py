"""Fixtures of the system tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagebus.bus.contract import Bus
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names


@pytest.fixture
def redis_bus_factory(redis_url: str) -> Callable[[], Bus]:
    """Opens connections to the session's Redis, under the deployment name that settings have by default."""
    return lambda: RedisBus(redis_url, Names())
