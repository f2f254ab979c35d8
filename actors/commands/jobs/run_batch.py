"""`pagebus run-batch`: a deployment for one file."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from pagebus.actors.commands.jobs.ordering import bad_lines, put_in_order
from pagebus.actors.commands.jobs.transfer import collect, submit
from pagebus.actors.runtime.gpus import visible_gpus
from pagebus.actors.runtime.one_machine import check_folders, check_one_process, private_redis, uses_one_process
from pagebus.actors.runtime.process import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, StopSignal, make_bus, stop_on_signals
from pagebus.actors.runtime.single_process import SingleProcess
from pagebus.actors.runtime.supervisor import Supervisor, plan_children
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry import logs
from pagebus.actors.telemetry.last_words import say
from pagebus.actors.telemetry.progress import Progress, ProgressStream
from pagebus.bus.contract import Bus, BusError
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names

SHOWN_BAD_LINES = 20


def run_batch(settings: Settings, requests: Path, results: Path) -> int:
    """Answer a file; returns the exit code: 1 also if a line could not be answered, 130 if a signal has come before."""
    if settings.log_level == "info":
        settings = settings.replace(log_level="warning")
    terminal = sys.stderr.isatty()
    progress = Progress(sys.stderr, terminal=terminal)
    logs.configure(settings.log_level, settings.log_format, stream=ProgressStream(progress, terminal))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results.unlink(missing_ok=True)
        try:
            code = runner.run(_run(settings.replace(port=0), requests, results, progress))
        except BusError as error:
            say(error)
            return EXIT_FAILED
    return tell_bad_lines(requests, results) if code == EXIT_OK else code


def tell_bad_lines(requests: Path, results: Path) -> int:
    """Say which lines were not computed, and why; returns the exit code."""
    count = 0
    for number, problem in bad_lines(requests, results):
        count += 1
        if count <= SHOWN_BAD_LINES:
            print(f"pagebus: {requests}:{number}: {problem}", file=sys.stderr)
    if count > SHOWN_BAD_LINES:
        print(f"pagebus: {requests}: {count} lines were not computed; {results} says why", file=sys.stderr)
    return EXIT_FAILED if count else EXIT_OK


async def _run(settings: Settings, requests: Path, results: Path, progress: Progress) -> int:
    if settings.bus is not None and not uses_one_process(settings):
        await transfer(make_bus(settings), settings, requests, results, progress)
        return EXIT_OK
    started = asyncio.Event()
    with stop_on_signals() as stop:
        if uses_one_process(settings):
            check_one_process(settings, visible_gpus(os.environ))
            server = MemoryServer()
            system: SingleProcess | Supervisor = SingleProcess(settings, progress, lambda _: started.set(), server)
            bus: Bus = MemoryBus(server, Names(settings.name))
            return await _beside(system, stop, started, transfer(bus, settings, requests, results, progress))
        check_folders(settings)
        async with private_redis(settings.data_dir) as redis:
            gpus, cores = visible_gpus(os.environ), len(os.sched_getaffinity(0))
            settings = settings.replace(bus=redis.url).shared_out(cores)
            watching = make_bus(settings)

            async def connect() -> Bus:
                await watching.connect()
                return watching

            plans = plan_children(settings, redis.url, environ=os.environ, gpus=gpus, cores=cores)
            system = Supervisor(settings, connect, plans, progress, lambda _: started.set(), redis)
            try:
                work = transfer(make_bus(settings), settings, requests, results, progress)
                return await _beside(system, stop, started, work)
            finally:
                await watching.close()


async def _beside(
    system: SingleProcess | Supervisor, stop: StopSignal, started: asyncio.Event, work: Coroutine[Any, Any, None]
) -> int:
    """Run the system as long as the work takes. Its exit code if it fails, another one if a signal ends it."""
    running = asyncio.create_task(system.run(stop))
    waiting = asyncio.create_task(started.wait())
    working = asyncio.create_task(work_after(waiting, work))
    try:
        await asyncio.wait({running, working}, return_when=asyncio.FIRST_COMPLETED)
        done = working.done()
        if done:
            stop()
        code = await running
        if done:
            await working
            return EXIT_OK
        return code or EXIT_STOPPED
    finally:
        for task in (waiting, working):
            task.cancel()
        await asyncio.gather(waiting, working, return_exceptions=True)


async def work_after(waiting: asyncio.Task[Any], work: Coroutine[Any, Any, None]) -> None:
    """The work, once the system has started."""
    try:
        await waiting
    except BaseException:
        work.close()
        raise
    await work


async def transfer(bus: Bus, settings: Settings, requests: Path, results: Path, progress: Progress) -> None:
    """Push all lines, write results as they arrive to a file with a unique name, then sort them."""
    names, batch = Names(settings.name), f"run-{uuid.uuid4().hex}"
    try:
        await bus.connect()
        async with asyncio.TaskGroup() as group:
            group.create_task(submit(bus, names, requests, batch, lambda *_: None))
            group.create_task(collect(bus, names, batch, results, progress.show, wait=True))
        await bus.delete(names.batch_results(batch), names.batch(batch))
        await asyncio.to_thread(put_in_order, results)
    finally:
        progress.done()
        await bus.close()
