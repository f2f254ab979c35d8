"""The ``serve`` command: chooses between processes over Redis and one process over memory, and says what it does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from pagebus.actors.commands.before_start import check_model, check_port, check_settings
from pagebus.actors.runtime.actor import describe
from pagebus.actors.runtime.gpus import list_gpus, take_free_gpus, visible_gpus
from pagebus.actors.runtime.health_check import url_of
from pagebus.actors.runtime.one_machine import check_one_process, private_redis, uses_one_process, with_files
from pagebus.actors.runtime.process import (
    EXIT_FAILED,
    EXIT_OK,
    StopSignal,
    cause_of,
    make_bus,
    stop_on_signals,
    unless_stopped,
)
from pagebus.actors.runtime.supervisor import Supervisor, plan_children
from pagebus.actors.runtime.version import version
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.telemetry import logs
from pagebus.actors.telemetry.last_words import say
from pagebus.actors.telemetry.progress import Progress, ProgressStream
from pagebus.bus.contract import Bus, BusError


def serve(settings: Settings) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        SettingsError: the settings conflict with this machine, or the file of keys is wrong.
        ModelError: there is no such model, or it cannot be served.
    """
    check_settings(settings)
    terminal = sys.stderr.isatty()
    log_format = settings.log_format if settings.log_format != "auto" else "console" if terminal else "json"
    settings = settings.replace(log_format=log_format, health_file=None)  # of one actor, not of all
    log = logs.get_logger(actor="serve")

    def tell(phase: str, share: float | None) -> None:
        log.info("starting", phase=phase, progress=share)

    progress = Progress(sys.stderr, terminal=terminal, tell=tell)
    logs.configure(settings.log_level, log_format, stream=ProgressStream(progress, terminal))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, progress, terminal))


async def _serve(settings: Settings, progress: Progress, terminal: bool) -> int:
    started_s = asyncio.get_running_loop().time()

    def on_ready(addresses: list[str]) -> None:
        show(ready_text(settings, addresses, asyncio.get_running_loop().time() - started_s))

    await check_port(settings)
    with stop_on_signals() as stop:
        if uses_one_process(settings):
            from pagebus.actors.runtime.single_process import SingleProcess

            gpus = visible_gpus(os.environ)
            check_one_process(settings, gpus)
            show(banner(settings, one_process=True, gpus=len(gpus)))
            with with_files(settings) as settings:
                system = SingleProcess(settings, progress, on_ready)
                code = await system.run(stop)
            if system.error is not None:
                say(cause_of(system.error))
            return code
        environ = {**os.environ, "FORCE_COLOR": "1"} if terminal and not os.environ.get("NO_COLOR") else os.environ
        try:
            return await _serve_with_processes(settings, progress, environ, stop, on_ready)
        except BusError as error:
            logs.get_logger(actor="supervisor").error("no bus", error=describe(error))
            progress.done()
            say(error)
            return EXIT_FAILED


async def _serve_with_processes(
    settings: Settings,
    progress: Progress,
    environ: Mapping[str, str],
    stop: StopSignal,
    on_ready: Callable[[list[str]], None],
) -> int:
    """Processes over the given bus, or over a Redis server of our own."""
    async with contextlib.AsyncExitStack() as stack:
        redis = None if settings.bus else await stack.enter_async_context(private_redis(settings.data_dir))
        settings = stack.enter_context(with_files(settings))
        if redis is not None:
            settings = settings.replace(redis_password=None)  # only this deployment reaches it, and it needs none
        settings, gpus = locked_gpus(settings, visible_gpus(environ))
        bus_url = redis.url if redis is not None else settings.bus or ""
        unique = f"{_host_name()}-" if redis is None else ""
        cores = len(os.sched_getaffinity(0))
        settings = settings.shared_out(cores)
        plans = plan_children(settings, bus_url, environ=environ, gpus=gpus, cores=cores, unique=unique)
        show(banner(settings, one_process=False, gpus=len(gpus)))

        @functools.cache
        def opened() -> Bus:
            bus = make_bus(settings.replace(bus=bus_url))
            stack.push_async_callback(bus.close)
            return bus

        async def connect() -> Bus:
            await opened().connect()
            return opened()

        async def look() -> None:
            await check_model(await connect(), settings)

        if redis is None and not await unless_stopped(stop, look()):  # else each actor waits, and says so
            return EXIT_OK
        return await Supervisor(settings, connect, plans, progress, on_ready, redis).run(stop)


def locked_gpus(settings: Settings, visible: list[str]) -> tuple[Settings, list[str]]:
    """The GPUs to divide among executors. With ranks and ``--gpu-lock-dir`` they are locked here, all or none: ranks of
    an executor share them.

    Raises:
        SettingsError: too few are free.
    """
    ranks, folder = settings.num_ranks, settings.gpu_lock_dir
    if ranks == 1 or folder is None or settings.device == "cpu":
        return settings, visible
    uuids, count = list_gpus(uuids=True), settings.executors * ranks
    chosen = take_free_gpus(Path(folder), uuids, count)
    if uuids and not chosen:
        raise SettingsError(f"--gpu-lock-dir: fewer than {count} of the {len(uuids)} GPUs of this machine are free")
    return settings.replace(gpu_lock_dir=None), chosen


def show(text: str) -> None:
    """Print for people. A disk that is full under their file is no reason not to serve."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def bus_text(settings: Settings) -> str:
    """The bus in words, without credentials."""
    if settings.bus is None:
        return "memory, in this process" if uses_one_process(settings) else "a private redis-server"
    parts = urlsplit(settings.bus)
    if parts.scheme == "memory":
        return "memory, in this process"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def banner(settings: Settings, *, one_process: bool, gpus: int) -> str:
    """What is about to be started."""
    device = settings.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    counts = settings.counts.items()
    actors = ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in counts if count)
    if settings.num_ranks > 1:
        actors += f"; executors of {settings.num_ranks} ranks"
    lines = [
        f"Pagebus {version()}",
        f"  model    {settings.model or 'the shipped one'}",
        f"  device   {device}",
        f"  bus      {bus_text(settings)}",
        f"  actors   {actors}" + (" (one process)" if one_process else ""),
    ]
    if one_process:
        why = "as --bus says" if settings.bus else "there is no redis-server on PATH"
        lines += [
            f"  note     all actors run in this one process, {why}: none of them can be restarted or",
            "           upgraded alone, nothing outlives the process, and they share one interpreter",
        ]
    return "\n".join(lines)


def ready_text(settings: Settings, addresses: list[str], took_s: float) -> str:
    """Where the service answers now."""
    key = ' -H "Authorization: Bearer $KEY"' if settings.api_key else ""
    if settings.uds is not None:
        ask = f"curl{key} --unix-socket {settings.uds} http://localhost/v1/models"
        return f"Ready after {took_s:.1f} s: {settings.uds}\n  {ask}"
    urls = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        urls.append(url_of(host, int(port)))
    return f"Ready after {took_s:.1f} s: {' '.join(urls)}\n  curl{key} {urls[0]}/v1/models"


def _host_name() -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in socket.gethostname())
