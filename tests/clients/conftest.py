"""Servers for real clients: an ingress with a fake backend, and ``pagebus serve`` with the shipped model.

With ``PAGEBUS_TEST_BASE_URL`` the tests run against that server instead. They know of a server only what
:class:`Expectations` says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import pytest

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.requests.served_model import ServedModel
from tests.helpers.waiting import LIMIT_S
from tests.web.fake_backend import MODEL, SENTENCE, Served, start_served

API_KEY = "test-key"
ROOT = Path(__file__).parents[2]


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
    is_whole: bool = False
    """A scheduler and an executor stand behind it, and their metrics are there."""


@dataclass(frozen=True)
class Target:
    """Where the server is, and what it promises."""

    base_url: str
    expects: Expectations


class Background:
    """A served ingress on an event loop of its own thread."""

    def __init__(self, model: ServedModel = MODEL) -> None:
        self._model = model
        self._ready: Future[tuple[Served, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        self._served, self._loop, self._stop = self._ready.result(LIMIT_S)
        return self._served

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)

    async def _run(self) -> None:
        server, stop = MemoryServer(), asyncio.Event()
        try:
            served = await start_served(lambda: MemoryBus(server), self._model, api_key=(API_KEY,))
        except BaseException as error:
            self._ready.set_exception(error)
            raise
        self._ready.set_result((served, asyncio.get_running_loop(), stop))
        await stop.wait()
        await served.stop()


@contextmanager
def fake_backend(model: ServedModel = MODEL) -> Iterator[Target]:
    """The real ingress in front of a backend that always says the same sentence, or what it is told to say."""
    with Background(model) as served:
        expects = Expectations(
            model=MODEL.name, max_model_len=MODEL.max_model_len or 0, completion="".join(SENTENCE), api_key=API_KEY
        )
        yield Target(f"{served.url}/v1", expects)


@contextmanager
def whole_system(*options: str) -> Iterator[Target]:
    """``pagebus serve`` as a user starts it: every actor a process, over a private redis-server."""
    command = [
        sys.executable,
        "-m",
        "pagebus.actors.commands.cli",
        "serve",
        "--port",
        "0",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    command += options
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        try:
            lines = list(takewhile(lambda line: "Ready after" not in line, server.stdout))
            assert server.poll() is None, lines
            # takewhile has read the line with the address; the next one shows it in a command
            url = server.stdout.readline().split()[-1].removesuffix("/models")
            yield Target(url, Expectations(model="pagebus", max_model_len=1024, is_whole=True))
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(LIMIT_S) == 0
            server.stdout.close()


@pytest.fixture(scope="session", params=["fake backend", "whole system"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The server all client tests talk to."""
    url = os.environ.get("PAGEBUS_TEST_BASE_URL")
    if url:
        expects = Expectations(
            model=os.environ.get("PAGEBUS_TEST_MODEL", "pagebus"),
            max_model_len=int(os.environ.get("PAGEBUS_TEST_MAX_MODEL_LEN", "1024")),
            api_key=os.environ.get("PAGEBUS_TEST_API_KEY", "none"),
        )
        yield Target(url, expects)
        return
    with fake_backend() if request.param == "fake backend" else whole_system() as server:
        yield server


@pytest.fixture(scope="session")
def calling() -> Iterator[Target]:
    """A server with parsers for calls of tools and reasoning, with the fake backend."""
    with fake_backend(replace(MODEL, auto_tools=True, tool_parser="hermes", reasoning_parser="qwen3")) as target:
        yield target


@pytest.fixture
def base_url(target: Target) -> str:
    """Where the server's ``/v1`` is."""
    return target.base_url


@pytest.fixture
def expects(target: Target) -> Expectations:
    """What the server promises."""
    return target.expects
