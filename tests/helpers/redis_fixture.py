"""Redis for tests: a pytest plugin that the top conftest loads.

``redis_url`` is one server for the whole session; ``redis_names`` gives each test a deployment name of its own on it,
so tests do not meet. ``private_redis`` is a server of one test's own, which it may kill.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from pagebus.bus.private_redis.server import PrivateRedis, find_redis_server
from pagebus.bus.streams import Names
from tests.helpers.waiting import LIMIT_S

_numbers = count(1)


def _need_server() -> str:
    program = find_redis_server()
    if program is None:
        pytest.skip("no redis-server on PATH: install Redis 7 or newer to run the tests that need one")
    return program


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a redis-server on a Unix socket that lives as long as the test session."""
    program = _need_server()
    folder = Path(tempfile.mkdtemp(prefix="pagebus-test-", dir="/tmp"))
    socket = folder / "redis.sock"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not socket.exists():
            assert process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, "redis-server made no socket"
            time.sleep(0.02)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis_names(redis_url: str) -> Names:
    """Names of a deployment that no other test of the session uses."""
    return Names(f"test{next(_numbers)}")


@pytest.fixture
async def private_redis() -> AsyncIterator[PrivateRedis]:
    """A started server of this test's own; the test may kill it and start it again.

    It writes everything to disk before it answers: with ``everysec`` a kill may cost answered writes on a slow disk.
    """
    _need_server()
    folder = tempfile.mkdtemp(prefix="pagebus-test-", dir="/tmp")
    server = PrivateRedis(folder, fsync="always")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
