"""All actors on a thread of this process: what `pagebus serve --bus memory://` runs, for one program."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from pagebus.actors.offline.client import Client
from pagebus.actors.runtime.process import StopSignal
from pagebus.actors.runtime.single_process import SingleProcess
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Run:
    """The actors on their thread: its loop, what ends them, and the task that they run in."""

    loop: asyncio.AbstractEventLoop
    stop: StopSignal
    life: asyncio.Task[int]


class System:
    """Starts the actors and waits until they answer.

    Raises:
        Exception: what ended an actor before that: a model that is not there, too little memory.
    """

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._ready: Future[Client] = Future()
        self._system = SingleProcess(settings, progress, self._on_ready)
        self._api_key = settings.api_key[0]
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._pid = os.getpid()
        self._begun: Future[_Run] = Future()
        self._thread = threading.Thread(target=self._run, name="pagebus", daemon=True)
        self._thread.start()
        try:
            self.client = self._ready.result()
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)
        _close_all_with_the_program()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the actors' loop. An interrupt of the caller cancels it.

        Raises:
            RuntimeError: the system is closed, or has ended meanwhile; or it is another process's.
        """
        if self._closed or not self._thread.is_alive():
            work.close()
            raise self._refusal()
        future = asyncio.run_coroutine_threadsafe(self._unless_ended(work), self._begun.result().loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _refusal(self) -> RuntimeError:
        if self._pid != os.getpid():
            return RuntimeError("this LLM was made before the process forked, and runs in the other one: make one here")
        if self._closed:
            return RuntimeError("this LLM is closed")
        error = RuntimeError("the system has ended")
        error.__cause__ = self._why()
        return error

    def close(self) -> None:
        """Drain the actors and wait for their end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            run = self._begun.result()
            run.loop.call_soon_threadsafe(run.stop)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        stop = StopSignal()
        life = asyncio.create_task(self._system.run(stop))
        self._begun.set_result(_Run(asyncio.get_running_loop(), stop, life))
        await asyncio.wait({life})
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._ready.done():
            await self._ready.result().close()
        else:
            self._ready.set_exception(self._why())

    def _on_ready(self, addresses: list[str]) -> None:
        self._ready.set_result(Client(f"http://{addresses[0]}", self._api_key))

    async def _unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        task, life = asyncio.create_task(work), self._begun.result().life
        self._calls.add(task)
        try:
            await asyncio.wait({task, life}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                raise RuntimeError("the system has ended") from self._why()
            return task.result()
        finally:
            self._calls.discard(task)
            task.cancel()

    def _why(self) -> BaseException:
        life = self._begun.result().life
        if not life.cancelled() and (error := life.exception()) is not None:
            return error
        return self._system.error or RuntimeError("the system was stopped")


_OPEN: weakref.WeakSet[System] = weakref.WeakSet()


@functools.cache
def _close_all_with_the_program() -> None:
    """What atexit calls comes too late: from then on no thread can be started, and the actors need some to end. So a
    thread that the interpreter waits for, as it does for all that are not daemons, waits for the main thread."""

    def close_all() -> None:
        threading.main_thread().join()
        for system in list(_OPEN):
            system.close()

    threading.Thread(target=close_all, name="pagebus-end").start()
