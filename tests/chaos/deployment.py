"""A whole ``pagebus serve`` over a Redis of its own, and hands that kill, freeze and restart parts of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.chaos.servers import OneServer, Replicated, free_port
from tests.helpers.oracle import make_oracle

ROOT = Path(__file__).parents[2]
START_S = 120.0
KINDS = ("ingress", "jobs", "tokenizer", "scheduler", "executor", "detokenizer")
QUIET_S = 45.0
"""Longer than requests are kept for clients that do not come back."""
LASTING = re.compile(r"pb:\{pagebus\}:(lease|granted|state):|pb:\{pagebus\}:(leases|epochs)$")
"""Keys of a deployment at rest besides its (empty) streams."""


class Deployment:
    """Processes, not tasks: it lives longer than the event loop of one test. A ``step_ms`` of 0 is for the shipped
    model instead of an oracle, ``model`` is another one."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        step_ms: int = 15,
        servers: OneServer | Replicated | None = None,
        vocab_size: int = 0,
        model: Path | None = None,
    ) -> None:
        self.folder = folder
        self.model = model or make_oracle(folder / "model", step_ms=step_ms, vocab_size=vocab_size)
        dummy = () if model is not None else ("--load-format", "dummy")
        served = (str(self.model), *dummy) if step_ms else ()
        self.servers = servers or OneServer()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "stderr").open("wb") as stderr, (folder / "stdout").open("wb") as stdout:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pagebus.actors.commands.cli", "serve", *served),
                    *("--bus", self.servers.url, "--port", str(port), "--served-model-name", "oracle"),
                    *("--device", "cpu", "--threads", "1", "--max-num-seqs", "128", "--cpu-kv-cache-gib", "0.002"),
                    *("--swap-space", "0.002", "--resume-timeout-s", "8", *arguments),
                ],
                cwd=ROOT,
                stdout=stdout,
                stderr=stderr,
            )
        try:
            self.until_healthy()
        except BaseException:
            self.destroy()
            raise

    # -- processes ----------------------------------------------------------------------------------------------------
    def actors(self) -> dict[str, psutil.Process]:
        """The actor processes by name (not what they have started themselves)."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if name := re.search(r"--actor-name=(\S+)", " ".join(child.cmdline())):
                    found[name[1]] = child
        return found

    def of_kind(self, kind: str) -> list[psutil.Process]:
        return [child for name, child in sorted(self.actors().items()) if name.startswith(f"{kind}-")]

    def send(self, number: signal.Signals, *kinds: str) -> float:
        """Send a signal to all actors of these kinds; returns when."""
        for kind in kinds:
            for child in self.of_kind(kind):
                with contextlib.suppress(psutil.Error):
                    child.send_signal(number)
        return time.monotonic()

    def kill(self, *kinds: str) -> float:
        return self.send(signal.SIGKILL, *kinds)

    def kill_one(self, kind: str) -> float:
        """The one of two that works: of schedulers the one that leads."""
        processes = self.of_kind(kind)
        if kind == "scheduler":
            lease = json.loads(self.redis.get("pb:{pagebus}:lease:scheduler:leader"))
            processes = [process for process in processes if process.pid == lease["info"]["pid"]]
        processes[0].kill()
        return time.monotonic()

    # -- Redis --------------------------------------------------------------------------------------------------------
    @property
    def redis(self) -> redis.Redis:
        """A client of the server that takes writes."""
        return self.servers.client

    def start_redis(self) -> None:
        self.servers.server.start()

    def kill_redis(self) -> None:
        self.servers.server.kill()

    # -- states -------------------------------------------------------------------------------------------------------
    def until_healthy(self) -> None:
        """Wait until it would answer."""
        deadline_s = time.monotonic() + START_S
        while not self._healthy():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.05)

    def until_ready(self, name: str) -> None:
        """Wait until this actor does its work (a second scheduler: until it stands by)."""
        deadline_s = time.monotonic() + START_S
        key = f"pb:{{pagebus}}:lease:{name.partition('-')[0]}:{name}"
        while name not in self.actors() or not (name.startswith("scheduler") or self._says_ready(key)):
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.05)

    def _says_ready(self, lease: str) -> bool:
        return b'"ready"' in (self.redis.get(lease) or b"")

    def _healthy(self) -> bool:
        try:
            return self.health()[0] == 200
        except OSError:
            return False

    def health(self) -> tuple[int, dict[str, Any]]:
        """What ``/health`` says."""
        return self._request("/health")

    def new_request(self) -> int:
        """The status that a client gets who asks now."""
        return self._request("/v1/completions", b'{"model": "oracle", "prompt": "a", "max_tokens": 1}')[0]

    def _request(self, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def log(self) -> str:
        return (self.folder / "stderr").read_text()[-6000:]

    def last_start_s(self, kind: str) -> float:
        """From the last death of this kind's process to its successor's being ready: mostly imports and loading."""
        ended = ready = 0.0
        for line in (self.folder / "stderr").read_text().splitlines():
            told = json.loads(line) if line.startswith("{") else {}
            at_s = datetime.fromisoformat(told["timestamp"]).timestamp() if "timestamp" in told else 0.0
            if told.get("event") == "process ended" and told["process"].startswith(kind):
                ended = at_s
            if told.get("event") == "ready" and told["actor"].startswith(kind):
                ready = at_s
        return ready - ended

    def leftovers(self) -> list[str]:
        """What a deployment at rest must not have: entries in streams, other keys, blocks in use, processes."""
        found = []
        for raw in sorted(self.redis.keys("*")):
            key = raw.decode()
            if LASTING.match(key):
                continue
            if self.redis.type(raw) != b"stream":
                found.append(f"key {key}")
            elif length := self.redis.xlen(raw):
                found.append(f"{length} entries in {key}")
            else:
                groups = self.redis.xinfo_groups(raw)
                found += [f"{group['pending']} pending in {key}" for group in groups if group["pending"]]
        return found + self._held()

    def _held(self) -> list[str]:
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return [line for line in lines if line.startswith(gauges) and float(line.rsplit(" ", 1)[1])]

    async def until_at_rest(self) -> list[str]:
        """Wait for the rest that follows the last request; what is left over then."""
        deadline_s = time.monotonic() + QUIET_S
        while True:
            await asyncio.to_thread(self.until_healthy)
            left = await asyncio.to_thread(self.leftovers)
            if not left or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(0.5)

    # -- the end ------------------------------------------------------------------------------------------------------
    def stop(self) -> int:
        """As SIGTERM does; returns the exit code. Nothing may be left."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        alive = [child for child in children if child.is_running()]
        assert not alive, f"left over: {alive}"
        return code

    def destroy(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.servers.destroy()


@contextlib.contextmanager
def deployed(
    folder: Path,
    *arguments: str,
    step_ms: int = 15,
    servers: OneServer | Replicated | None = None,
    vocab_size: int = 0,
    model: Path | None = None,
) -> Iterator[Deployment]:
    """A deployment that ends with the block."""
    deployment = Deployment(folder, *arguments, step_ms=step_ms, servers=servers, vocab_size=vocab_size, model=model)
    try:
        yield deployment
    finally:
        deployment.destroy()
