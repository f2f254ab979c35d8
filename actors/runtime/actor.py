"""The base of every actor: a lease that proves that it lives, a loop, and one way to end.

:meth:`Actor.run` takes the lease (waiting as a standby while another holds it), then calls ``start``, ``serve`` until
told to drain, ``drain`` and ``stop``, and gives the lease back. Beside it run the heartbeat, which renews the lease,
and the publisher of metrics. An error in the loop, or in any task made with :meth:`Actor.spawn`, ends the actor with
that error: a half-dead actor would look alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from pagebus.actors.runtime.health_check import is_ready
from pagebus.actors.runtime.health_file import HealthFile
from pagebus.actors.runtime.tasks import cancel, first_of, set_within
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.logs import get_logger
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.actors.telemetry.process_metrics import ProcessMetrics
from pagebus.bus.contract import Bus, BusError, BusRefused, BusUnavailable, LeaseInfo, LeaseTaken
from pagebus.bus.streams import Names

T = TypeVar("T")

METRICS_INTERVAL_S = 1.0
METRICS_LEAST_S = 0.2
"""Least time between two publications of metrics, also after :meth:`Actor.publish_soon`."""
METRICS_TTL_S = 15.0
RETRY_S = 0.5
"""Pause before the next call to a bus that is away."""
STANDBY_LOOK_S = 0.2
"""Interval at which a standby checks whether the lease is free."""
STOP_AFTER_FAILURE_S = 5.0
"""Longest time of :meth:`Actor.stop` after a failure: what it waits for may never happen."""


def orders_state(kind: str, name: str) -> str:
    """Key on the bus of an operator's order to an actor: ``{"epoch": ..., "order": "drain" | "stop"}``. Only the actor
    of this epoch obeys it, at the next renewal of its lease."""
    return f"orders:{kind}:{name}"


class Stopped(Exception):
    """An operator has ended the actor at once."""


def metrics_state(kind: str, name: str) -> str:
    """Key on the bus of an actor's metrics."""
    return f"metrics:{kind}:{name}"


def actor_of(lease: LeaseInfo) -> str:
    """The name of the actor that holds a lease: the lease of an exclusive role has another name."""
    return str(lease.info.get("actor", lease.name))


class Actor(ABC):
    """Base of all actors. Every method runs on the event loop of :meth:`run`."""

    kind: ClassVar[str]

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        self.settings = settings
        self.bus = bus
        self.name = name
        self.names = Names(settings.name)
        self.log = get_logger(actor=name)
        self.metrics = Metrics()
        self.epoch = 0
        self.draining = asyncio.Event()
        self.state = "starting"
        self._on_ready: Callable[[], None] = lambda: None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._failed: asyncio.Future[None] | None = None
        self._beat_now = asyncio.Event()
        self._renewed = asyncio.Event()
        self._health = HealthFile(settings.health_file)
        self._publish_now = asyncio.Event()
        self.bus_trouble = ""
        """Why the bus rejects writes, once it has refused two consecutive renewals of the lease; contains no
        address."""
        bus.tell_restarts(self._bus_restarted)
        self.bus_is_away = False
        """Whether the last renewal of the lease has failed."""
        self._renewed_s = math.inf
        """Start of the last renewal of the lease, from which the lease's time counts."""
        self._restarted_s = self._doubtful_until_s = -math.inf
        """When a restart of the bus was detected, and until when it may have forgotten the lease's holder."""

    def when_ready(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once the actor is ready."""
        self._on_ready = call

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def lease_name(self) -> str:
        """The name of the lease; the actor's own unless the role is exclusive (the scheduler)."""
        return self.name

    def lease_info(self) -> dict[str, Any]:
        """The actor's report about itself in its lease (JSON). Subclasses add to it."""
        return {"state": self.state, "pid": os.getpid(), "host": socket.gethostname(), "actor": self.name}

    def is_well(self) -> bool:
        """The answer of health checks: whether the actor does its work."""
        return is_ready(self.lease_info())

    async def stand_by(self) -> None:  # noqa: B027 (optional)
        """Called five times a second while another actor holds the lease."""

    async def start(self) -> None:  # noqa: B027 (optional)
        """Prepare: connect, load. A drain request that comes meanwhile cancels it."""

    @abstractmethod
    async def serve(self) -> None:
        """The loop; returns once :attr:`draining` is set and the loop has come to rest."""

    async def drain(self) -> None:  # noqa: B027 (optional)
        """Called once ``serve`` has returned, while spawned tasks still run: send what is queued."""

    async def bequeath(self, error: BaseException) -> None:  # noqa: B027 (optional)
        """Store information for a successor when ``error`` ends the actor. It has a few seconds, while spawned tasks
        still run."""

    async def stop(self) -> None:  # noqa: B027 (optional)
        """Free resources. After a failure it has only a few seconds."""

    async def measure(self) -> None:  # noqa: B027 (optional)
        """Update metrics that are not updated by events; called before each publication."""

    def set_state(self, state: str) -> None:
        """Change the state in the lease at once."""
        self.state = state
        self.renew_soon()

    def renew_soon(self) -> None:
        """Renew the lease at once, because something that it tells has changed."""
        self._beat_now.set()

    def publish_soon(self) -> None:
        """Publish metrics before the next second, because something that gauges report has ended."""
        self._publish_now.set()

    def request_drain(self) -> None:
        """Finish running work, accept no new work, then end."""
        if not self.draining.is_set():
            self.log.info("draining")
            self.draining.set()
            self.set_state("draining")

    def lease_lapsed(self) -> None:  # noqa: B027 (optional)
        """Called if the lease had expired at its renewal: the bus or this process was away, or the clock of Redis
        jumped."""

    def _bus_restarted(self) -> None:
        self.log.warning("the bus has been started anew")
        self._restarted_s = time.monotonic()
        self._beat_now.set()  # it may have lost the lease
        self.bus_restarted()

    def bus_restarted(self) -> None:  # noqa: B027 (optional)
        """Called if the bus's server was restarted or replaced, and may have lost its last writes."""

    async def confirm_lease(self) -> None:
        """Wait until the lease is held for certain.

        A process frozen for longer than its lease may have been given up meanwhile. Where late writes could do harm,
        call this between a read, or a wait, and its consequences. An actor that has been given up ends here. A
        restarted bus may have forgotten the revocation, so an actor that finds its lease expired there waits until
        those who may remember it have had time to report it.
        """
        while time.monotonic() - self._renewed_s > self.settings.lease_ttl_s:
            self._renewed.clear()
            self._beat_now.set()
            await self._renewed.wait()

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run ``coro`` beside the loop. It may return at any time; an exception in it ends the actor."""
        task = asyncio.create_task(coro, name=f"{self.name}:{name}")
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the actor's whole life. Returns after a drain; otherwise raises the error that ended the actor, which
        the caller logs.

        Raises:
            Fenced: another actor has taken over this one's lease.
        """
        self._failed = asyncio.get_running_loop().create_future()
        if not await self._acquire():
            return
        heartbeat = self.spawn(self._heartbeat(), "heartbeat")
        publisher = self.spawn(self._publish_metrics(), "metrics")
        stop_limit_s = STOP_AFTER_FAILURE_S
        try:
            await self._guard(self._serve_until_drained())
            stop_limit_s = self.settings.drain_timeout_s + STOP_AFTER_FAILURE_S
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                await self._within(STOP_AFTER_FAILURE_S, "bequest", self.bequeath(error))
            raise
        finally:
            await self._shut_down(stop_limit_s, last=(heartbeat, publisher))

    async def _serve_until_drained(self) -> None:
        if not await self._start_unless_draining():
            return
        if not self.draining.is_set():
            self.set_state("ready")
            self.log.info("ready")
            self._on_ready()
        serving = asyncio.create_task(self._serve_and_drain(), name=f"{self.name}:serve")
        try:
            await first_of(serving, self.draining)
            if self.draining.is_set() and not serving.done():
                await asyncio.wait([serving], timeout=self.settings.drain_timeout_s)
            if not serving.done():
                self.log.warning("drain timed out", after_s=self.settings.drain_timeout_s)
                return
            await serving
        finally:
            await cancel(serving)

    async def _serve_and_drain(self) -> None:
        await self.serve()
        await self.drain()

    async def _start_unless_draining(self) -> bool:
        """False if the actor was told to drain before it had started."""
        starting = asyncio.create_task(self.start(), name=f"{self.name}:start")
        try:
            await first_of(starting, self.draining)
            if not starting.done():
                return False
            await starting
            return True
        finally:
            await cancel(starting)

    async def _guard(self, coro: Coroutine[Any, Any, None]) -> None:
        """Run ``coro``; the one place where a failed spawned task ends the actor with its error."""
        assert self._failed is not None
        task = asyncio.create_task(coro, name=f"{self.name}:life")
        try:
            await asyncio.wait([task, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            await task
        finally:
            await cancel(task)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
        else:
            self.log.error("task failed", task=task.get_name(), error=describe(error))

    async def _shut_down(self, limit_s: float, *, last: tuple[asyncio.Task[Any], ...]) -> None:
        """Stop, end all tasks (heartbeat and metrics last, so that the lease outlives the work), release the lease."""
        assert self._failed is not None
        await self._within(limit_s, "stop", self.stop())
        await cancel(*(task for task in self._tasks if task not in last))
        await cancel(*last)
        self._health.tell(False)
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # mark as seen: run() has raised it or something earlier
        self._failed.cancel()
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(self.settings.lease_ttl_s):
                await self.bus.release_lease(self.kind, self.lease_name(), self.epoch)
        self.log.info("stopped")

    async def _within(self, limit_s: float, what: str, coro: Coroutine[Any, Any, None]) -> None:
        """Run one of the actor's last actions; its failure is logged, and prevents nothing."""
        try:
            async with asyncio.timeout(limit_s):
                await coro
        except TimeoutError:
            self.log.warning(f"{what} timed out", after_s=limit_s)
        except Exception as error:
            self.log.error(f"{what} failed", error=describe(error))

    # -- lease and metrics --------------------------------------------------------------------------------------------

    async def _acquire(self) -> bool:
        """Wait for the lease; False if told to drain meanwhile."""
        told = False
        while not self.draining.is_set():
            pause_s = min(STANDBY_LOOK_S, self.settings.lease_ttl_s / 3)
            self._renewed_s = time.monotonic()
            try:
                self.epoch = await self.bus.acquire_lease(
                    self.kind, self.lease_name(), self.lease_info(), ttl_s=self.settings.lease_ttl_s
                )
                return True
            except LeaseTaken:
                self._health.tell(True)
                with contextlib.suppress(BusUnavailable):
                    await self.stand_by()
                if not told:
                    self.log.info("standing by: the lease is held", lease=self.lease_name())
            except BusUnavailable as error:
                pause_s = RETRY_S
                if not told:
                    self.log.warning("bus unavailable", error=describe(error))
            told = True
            await set_within(self.draining, pause_s)
        return False

    async def _heartbeat(self) -> None:
        """Renew the lease each third of its time, and at once when the state changes.

        While the bus is away it keeps trying: the lease may expire, and is taken back unless another actor took it.
        """
        ttl_s = self.settings.lease_ttl_s
        while True:
            pause_s = min(RETRY_S, ttl_s / 3) if self.bus_is_away else ttl_s / 3
            doubtful_s = self._doubtful_until_s - time.monotonic()
            await set_within(self._beat_now, min(pause_s, doubtful_s) if doubtful_s > 0 else pause_s)
            self._beat_now.clear()
            began_s = time.monotonic()
            try:
                held = await self.bus.renew_lease(
                    self.kind, self.lease_name(), self.epoch, self.lease_info(), ttl_s=ttl_s
                )
            except BusUnavailable as error:
                if self.bus_is_away:
                    self.bus_trouble = str(error) if isinstance(error, BusRefused) else "it does not answer"
                else:
                    self.log.warning("bus unavailable: the lease was not renewed", error=describe(error))
                self.bus_is_away = True
            else:
                if self.bus_is_away:
                    self.log.info("bus is back: the lease is renewed")
                self.bus_is_away = False
                self.bus_trouble = ""
                self._health.tell(self.is_well())
                if not held:
                    self.lease_lapsed()
                    if self._restarted_s > self._renewed_s:
                        self._doubtful_until_s = time.monotonic() + ttl_s / 3
                if time.monotonic() >= self._doubtful_until_s:
                    self._renewed_s = began_s
                    self._renewed.set()
                with contextlib.suppress(BusUnavailable):
                    await self._obey()

    async def _obey(self) -> None:
        """Apply the operator's order since the last renewal of the lease.

        Raises:
            Stopped: the order was to end.
        """
        name = orders_state(self.kind, self.name)
        (order,) = await self.bus.get_state(name)
        if order is None or order.get("epoch") != self.epoch:
            return
        await self.bus.delete_state(name)
        if order.get("order") == "stop":
            raise Stopped("an operator has stopped it")
        self.request_drain()

    async def _publish_metrics(self) -> None:
        usage = ProcessMetrics(self.metrics, self.name)
        while True:
            self._publish_now.clear()
            usage.measure()
            await self.publish_metrics()
            await asyncio.sleep(METRICS_LEAST_S)
            await set_within(self._publish_now, METRICS_INTERVAL_S - METRICS_LEAST_S)

    async def publish_metrics(self) -> None:
        """Put all metrics on the bus, with their wall-clock time ``time_s``; called once a second."""
        await self.measure()
        snapshot = {"time_s": time.time(), **self.metrics.snapshot()}
        with contextlib.suppress(BusUnavailable):
            await self.bus.put_state(metrics_state(self.kind, self.name), snapshot, ttl_s=METRICS_TTL_S)


def describe(error: BaseException) -> str:
    """``ValueError: text`` on one line."""
    return f"{type(error).__name__}: {error}".strip().rstrip(":")
