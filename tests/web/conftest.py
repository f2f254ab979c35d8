"""An ingress over the memory bus with a fake backend behind it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_backend import Serve, Served, start_served

from actors import logs
from bus.memory_bus import MemoryBus
from bus.memory_server import MemoryServer


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
