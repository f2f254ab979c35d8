"""An ingress over the memory bus with a fake backend behind it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from pagebus.actors.telemetry import logs
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.web.fake_backend import Serve, Served, start_served


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts ingresses with any settings; all of them are stopped in the end."""
    started: list[Served] = []

    async def start(**options: object) -> Served:
        server = MemoryServer()
        started.append(await start_served(lambda: MemoryBus(server), **options))
        return started[-1]

    yield start
    for served in started:
        await served.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that keeps no connection, so that nothing is left over."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


@pytest.fixture
def lines() -> Callable[[], list[dict[str, Any]]]:
    """What is logged from now on, as objects, once everything has stopped."""
    out = io.StringIO()
    logs.configure("debug", "json", stream=out)
    return lambda: [json.loads(line) for line in out.getvalue().splitlines()]
