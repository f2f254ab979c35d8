"""A deployment to be measured: ``pagebus serve`` as a process, over a redis-server that the benchmark can read too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.runtime.child import die_with_parent, python_path
from pagebus.actors.runtime.health_check import http_status, url_of
from pagebus.actors.runtime.readiness import ingress_addresses
from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import child_environment, to_args
from pagebus.bus.connect import open_bus
from pagebus.bus.contract import Bus
from pagebus.bus.private_redis.server import PrivateRedis
from pagebus.bus.streams import Names

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.01
LOG_TAIL_BYTES = 4000


class BenchError(Exception):
    """The benchmark cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment that answers. ``info`` is what its executor's lease says; times are seconds of the wall clock."""

    bus: Bus
    bus_url: str
    names: Names
    executor: str
    scheduler: str
    """The actor's name; its lease is the leader's."""
    detokenizers: tuple[str, ...]
    info: Mapping[str, Any]
    base_url: str
    started_s: float
    redis_s: float
    ready_s: float
    log: Path

    @property
    def vocab_size(self) -> int:
        return int(self.info["vocab_size"])


def as_served(settings: Settings, folder: Path, **changes: Any) -> Settings:
    """``settings`` for a deployment under measurement. The name of a shape becomes a model in ``folder``, to be served
    with random weights."""
    if settings.model in SHAPES:
        changes |= {"model": str(write_model_folder(settings.model, folder)), "load_format": "dummy"}
    return settings.replace(name="bench", port=0, log_format="json", **changes)


@contextlib.asynccontextmanager
async def deployed(settings: Settings, log: Path) -> AsyncIterator[Deployment]:
    """Start ``settings`` (made by :func:`as_served`), with one executor; its output goes to ``log``.

    Raises:
        BenchError: it ended, or did not answer in time; with the end of its log.
    """
    started_s = time.time()
    redis = PrivateRedis(None, before_exec=die_with_parent())
    try:
        url = await redis.start()
        redis_s = time.time()
        bus = open_bus(url, settings.name)
        await bus.connect()
        try:
            process = await _spawn(settings.replace(bus=url), log)
            try:
                yield await _until_ready(process, bus, settings.replace(bus=url), started_s, redis_s, log)
            finally:
                await _stop(process)
        finally:
            await bus.close()
    finally:
        await redis.stop()


async def _spawn(settings: Settings, log: Path) -> asyncio.subprocess.Process:
    environ = child_environment(settings, os.environ)
    environ["PYTHONPATH"] = python_path(environ)
    command = (sys.executable, "-P", "-m", "pagebus.actors.commands.cli", "serve", *to_args(settings))
    with log.open("wb") as out:
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=environ,
            start_new_session=True, preexec_fn=die_with_parent(),
        )  # fmt: skip


async def _until_ready(
    process: asyncio.subprocess.Process, bus: Bus, settings: Settings, started_s: float, redis_s: float, log: Path
) -> Deployment:
    """Poll the leases, then the health endpoint."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.returncode is not None:
            raise BenchError(f"the deployment ended with {process.returncode}:\n{_tail(log)}")
        leases = await bus.leases()
        executors = [lease for lease in leases if lease.kind == "executor" and lease.info.get("state") == "ready"]
        addresses = ingress_addresses(settings, leases)
        if executors and addresses and await http_status(*addresses[0], "/health") == 200:
            return Deployment(
                bus=bus,
                bus_url=settings.bus or "",
                names=Names(settings.name),
                executor=executors[0].name,
                scheduler=next(str(lease.info["actor"]) for lease in leases if lease.kind == "scheduler"),
                detokenizers=tuple(lease.name for lease in leases if lease.kind == "detokenizer"),
                info=executors[0].info,
                base_url=url_of(*addresses[0]),
                started_s=started_s,
                redis_s=redis_s,
                ready_s=time.time(),
                log=log,
            )
        await asyncio.sleep(POLL_S)
    raise BenchError(f"the deployment did not answer within {START_TIMEOUT_S:.0f} s:\n{_tail(log)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes away with the benchmark."""
    with tempfile.TemporaryDirectory(prefix="pagebus-bench-") as folder:
        yield Path(folder)
