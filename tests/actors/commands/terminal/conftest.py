"""A server for the commands to speak to, on a thread of its own: the real ingress before a backend that is a fake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.waiting import LIMIT_S
from tests.web.fake_backend import Served, start_served

API_KEY = "test-key"


class Background:
    """An ingress that another thread serves."""

    def __init__(self) -> None:
        self._ready: Future[tuple[Served, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self.served, self._loop, self._stop = self._ready.result(LIMIT_S)
        self.backend = self.served.backend
        self.url = f"{self.served.url}/v1"

    async def _run(self) -> None:
        server, stop = MemoryServer(), asyncio.Event()
        try:
            served = await start_served(lambda: MemoryBus(server), api_key=(API_KEY,))
        except BaseException as error:
            self._ready.set_exception(error)
            raise
        self._ready.set_result((served, asyncio.get_running_loop(), stop))
        await stop.wait()
        await served.stop()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until something holds of what the other thread does."""

        async def until() -> None:
            async with asyncio.timeout(LIMIT_S):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(until(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)


@pytest.fixture(scope="module")
def running() -> Iterator[Background]:
    """One server for all tests of a file."""
    background = Background()
    yield background
    background.close()


@pytest.fixture
def server(running: Background) -> Background:
    """The server, as if nothing had been asked of it yet."""
    running.backend.requests.clear()
    running.backend.aborts.clear()
    running.backend.answers = True
    return running


@pytest.fixture
def options(server: Background) -> list[str]:
    """What tells a command where the server is."""
    return ["--url", server.url, "--api-key", API_KEY]
