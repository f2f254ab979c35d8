"""A server for real clients: the one at ``PAGEBUS_TEST_BASE_URL`` if that is set, else an ingress with a fake backend.

The tests know of the server only what :class:`Expectations` says, so they run against a whole system as well.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "web"))

from fake_backend import MODEL, SENTENCE, Served, start_served

from bus.memory_bus import MemoryBus
from bus.memory_server import MemoryServer

API_KEY = "test-key"


@dataclass(frozen=True)
class Expectations:
    """What a server promises. ``completion`` is the greedy continuation of ``prompt``, None if that is not known.

    Greedy output must be the same each time it is asked for, at least ``min_tokens`` long for ``prompt`` and for
    ``question`` (with ``ignore_eos``).
    """

    model: str
    max_model_len: int
    prompt: str = "Once upon a time"
    question: str = "What is a dog?"
    min_tokens: int = 12
    completion: str | None = None
    api_key: str = "none"


@dataclass(frozen=True)
class Target:
    """Where the server is, and what it promises."""

    base_url: str
    expects: Expectations


class Background:
    """A served ingress on an event loop of its own thread."""

    def __init__(self) -> None:
        self._ready: Future[tuple[Served, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        self._served, self._loop, self._stop = self._ready.result(20)
        return self._served

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

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


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    """The server all client tests talk to."""
    url = os.environ.get("PAGEBUS_TEST_BASE_URL")
    if url:
        expects = Expectations(
            model=os.environ.get("PAGEBUS_TEST_MODEL", "pagebus"),
            max_model_len=int(os.environ.get("PAGEBUS_TEST_MAX_MODEL_LEN", "512")),
            api_key=os.environ.get("PAGEBUS_TEST_API_KEY", "none"),
        )
        yield Target(url, expects)
        return
    with Background() as served:
        expects = Expectations(
            model=MODEL.name, max_model_len=MODEL.max_model_len or 0, completion="".join(SENTENCE), api_key=API_KEY
        )
        yield Target(f"{served.url}/v1", expects)


@pytest.fixture
def base_url(target: Target) -> str:
    """Where the server's ``/v1`` is."""
    return target.base_url


@pytest.fixture
def expects(target: Target) -> Expectations:
    """What the server promises."""
    return target.expects
