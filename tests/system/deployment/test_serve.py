"""`pagebus serve` as a user runs it: it starts processes, answers, survives their deaths, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.waiting import LIMIT_S, until

ROOT = Path(__file__).parents[3]


class Serve:
    """A running ``pagebus serve`` with the shipped model."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.url = ""
        self.told = ""

    @classmethod
    async def start(cls, folder: Path, *arguments: str, path: str | None = None) -> Serve:
        environ = {**os.environ, "TMPDIR": str(folder), "PATH": path or os.environ["PATH"]}
        with (folder / "stderr").open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(
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
                ),
                *arguments,
                cwd=ROOT,
                env=environ,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
            )
        return cls(process, folder)

    async def ready(self) -> None:
        """Read standard output until the address is there."""
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            while not self.url:
                line = (await self.process.stdout.readline()).decode()
                assert line, self.stderr()
                self.told += line
                if found := re.search(r"Ready after .*?(http://\S+)", line):
                    self.url = found[1]

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def children(self) -> dict[str, psutil.Process]:
        """Processes it has started: actors by name, and redis."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                line = " ".join(child.cmdline())
                if name := re.search(r"--actor-name=(\S+)|(redis)-server", line):
                    found[name[1] or name[2]] = child
        return found

    async def answer(self) -> str:
        """What the model says a dog is."""
        return await asyncio.to_thread(self._ask)

    async def answer_once_back(self) -> str:
        """The same, asked again while new requests are refused: it may only now be noticed that something is away."""
        while True:
            await self.until_healthy()
            try:
                return await self.answer()
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise

    def _ask(self) -> str:
        message = {"role": "user", "content": "What is a dog?"}
        body = json.dumps({"model": "pagebus", "messages": [message], "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    async def until_healthy(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not await asyncio.to_thread(self._healthy):  # noqa: ASYNC110 (nothing tells us)
                await asyncio.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=LIMIT_S) as response:
                return bool(response.status == 200)
        except OSError:
            return False


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts servers and makes sure that they end."""
    servers: list[Serve] = []

    async def start(*arguments: str, **options: Any) -> Serve:
        servers.append(await Serve.start(tmp_path, *arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.returncode is None:
            server.process.kill()
        await server.process.wait()


async def test_processes(serve: Callable[..., Any], tmp_path: Path) -> None:
    """Five actors and Redis run; what is killed comes back; SIGTERM drains all and leaves nothing behind."""
    server: Serve = await serve()
    await server.ready()
    assert "a private redis-server" in server.told
    children = server.children()
    names = {"redis", "ingress-0", "tokenizer-0", "scheduler-0", "executor-0", "detokenizer-0", "jobs-0"}
    assert set(children) == names
    answer = await server.answer()
    assert answer

    for name in ("detokenizer-0", "redis"):
        dead = children[name]
        dead.kill()
        await until(lambda name=name, dead=dead: server.children().get(name, dead) != dead)  # type: ignore[misc]
        assert await server.answer_once_back() == answer

    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert await server.process.wait() == 0, server.stderr()
    assert [name for name, child in children.items() if child.is_running()] == []
    assert os.listdir(tmp_path) == ["stderr"]


async def test_nothing_outlives_the_supervisor(serve: Callable[..., Any]) -> None:
    """SIGKILL for the supervisor ends every process it started."""
    server: Serve = await serve()
    await server.ready()
    children = server.children()
    server.process.kill()
    await server.process.wait()
    await until(lambda: not any(_lives(child) for child in children.values()))


async def test_one_process(serve: Callable[..., Any]) -> None:
    """Without a redis-server all actors run in one process, say so, answer, and end on SIGINT."""
    server: Serve = await serve(path="/nowhere")
    await server.ready()
    assert "there is no redis-server on PATH" in server.told
    assert server.children() == {}
    assert await server.answer()
    server.process.send_signal(signal.SIGINT)
    assert await server.process.wait() == 0, server.stderr()


async def test_missing_model(serve: Callable[..., Any]) -> None:
    """A model that is not there ends the command at once, with the cause as its last words."""
    server: Serve = await serve("/no/such/model")
    assert await server.process.wait() == 2
    lines = server.stderr().splitlines()
    assert "/no/such/model" in lines[-1]
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    failed = [entry["actor"] for entry in logged if "/no/such/model" in entry.get("error", "")]
    assert len(failed) == len(set(failed)), "one line for each actor that failed"
    assert not any("restart_in_s" in entry for entry in logged), "nothing is restarted"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
