"""Watches the deployment for all pages connected to this ingress, and only while there are any.

It sends the scheduler one query at a time, at most ten a second, and never so often that answering takes more than
:data:`SCHEDULER_SHARE` of the scheduler's time. Each answer is encoded once for all pages.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson
from msgspec.structs import asdict

from pagebus.actors.runtime.actor import actor_of, describe, metrics_state
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import Bus, BusUnavailable, LeaseInfo
from pagebus.bus.messages import REQUEST_COLUMNS, SchedulerState, StateRequested
from pagebus.bus.streams import Names
from pagebus.web.http.errors import ApiError, bus_away
from pagebus.web.observatory.board import COLUMNS, Board
from pagebus.web.observatory.failures import FAILURES_S, failures_of
from pagebus.web.observatory.history import STORE_EVERY_S, History
from pagebus.web.observatory.roster import Roster, hold_of, key_of, stream_lengths
from pagebus.web.observatory.scheduler_queries import SchedulerQueries
from pagebus.web.observatory.vitals import FIGURES, RESUMED, Totals, total

STATE_EVERY_S = 0.1
SCHEDULER_SHARE = 0.005
"""The share of the scheduler's time that snapshots may take."""
STATE_AT_LEAST_S = 2.0
"""The longest pause in seconds between maps, even if they take more than that share."""
VITALS_EVERY_S = 1.0
SAY_AGAIN_S = 5.0
"""Seconds after which unchanged data is sent again, so that a page knows that it is still connected."""
MAX_BEHIND = 100
"""The most events that a page may lag behind; beyond that it starts anew."""


class Watcher:
    """One page and the events not yet sent to it."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self._ended = False
        self.lost = True
        """Whether the page needs all maps in full."""
        self.behind = False
        """Whether it has missed events, and needs what is told only when it changes."""

    def tell(self, event: bytes) -> None:
        if len(self._events) >= MAX_BEHIND:
            self._events.clear()
            self.lost = self.behind = True
        self._events.append(event)
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def events(self) -> bytes | None:
        """Events since the last call; waits for some. None: the stream has ended."""
        await self._news.wait()
        if self._ended:
            return None
        self._news.clear()
        events, self._events = self._events, []
        return b"".join(events)


class Observatory:
    """``leases`` are those the ingress knows; ``own_snapshot`` are its own metrics, which are newer than on the bus;
    ``missing`` names what keeps requests from being answered."""

    def __init__(
        self,
        bus: Bus,
        names: Names,
        queries: SchedulerQueries,
        leases: Callable[[], Sequence[LeaseInfo]],
        own: tuple[str, Callable[[], Mapping[str, Any]]],
        facts: Mapping[str, Any],
        log: Log,
        missing: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self.queries = queries
        self.roster = Roster()
        self.history = History(bus, self._totals, self._is_first)
        self._bus = bus
        self._names = names
        self._leases = leases
        self._own_name, self._own_snapshot = own
        self._facts = facts
        self._log = log
        self._missing = missing
        self._watchers: set[Watcher] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.board = Board()
        self._seen = (0, 0, 0)
        self._away = ""
        self._told_s: dict[str, float] = {}
        self._told: dict[str, Any] = {}
        self._standing: dict[str, bytes] = {}

    def look(self) -> None:
        """Write down what the leases say now; called twice a second, whether or not a page is connected."""
        now_s = time.time()
        self.roster.update(self._leases(), now_s)
        self.roster.chronicle.lacks(self._missing(), now_s)

    @property
    def restarts_alone(self) -> bool:
        """Whether an actor can be restarted without all others."""
        return bool(self._facts["restarts_alone"])

    async def order(self, name: str, order: Mapping[str, Any], ttl_s: float) -> None:
        """Store an order where its actor will find it.

        Raises:
            ApiError: 503, the bus is away.
        """
        try:
            await self._bus.put_state(name, order, ttl_s=ttl_s)
        except BusUnavailable as error:
            raise bus_away() from error

    # -- pages --------------------------------------------------------------------------------------------------------
    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def watch(self) -> Watcher:
        """Add a page."""
        watcher = Watcher()
        watcher.tell(sse("hello", {**self._facts, "columns": COLUMNS, "figures": FIGURES}))
        self._watchers.add(watcher)
        self._told.clear()
        if not self._tasks:
            self.board, self._seen, self._away = Board(), (0, 0, 0), ""
            self._standing.clear()
            follow = (self._follow_scheduler, self._follow_actors, self._follow_failures)
            self._tasks = [asyncio.create_task(once()) for once in follow]
            for task in self._tasks:
                task.add_done_callback(self._ended)
        watcher.tell(b"".join(self._standing.values()))
        if self._away:
            watcher.tell(sse("away", {"message": self._away}))
        return watcher

    async def leave(self, watcher: Watcher) -> None:
        """Remove a page."""
        self._watchers.discard(watcher)
        if not self._watchers:
            await self._rest()

    async def shut(self) -> None:
        """End the streams of all pages, because the ingress ends."""
        for watcher in list(self._watchers):
            watcher.end()
        await self._rest()

    async def _rest(self) -> None:
        """Stop watching."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """If a task has failed, end the streams of all pages. They connect again, which starts the tasks again."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._log.error("pages get no more data", error=describe(error))
        for other in self._tasks:
            other.cancel()
        self._tasks = []
        for watcher in self._watchers:
            watcher.end()

    def _tell(self, event: bytes) -> None:
        for watcher in self._watchers:
            watcher.tell(event)

    def _is_due(self, name: str, *, changed: bool) -> bool:
        """Whether to send an event: it has changed, or nothing has been sent for a while."""
        now_s = time.monotonic()
        if changed or now_s - self._told_s.get(name, -math.inf) >= SAY_AGAIN_S:
            self._told_s[name] = now_s
            return True
        return False

    def _tell_news(self, name: str, at_s: float, data: Mapping[str, Any]) -> None:
        changed = data != self._told.get(name)
        self._told[name] = data
        if self._is_due(name, changed=changed):
            self._tell(sse(name, {"at_s": at_s, **data}))

    def _tell_change(self, name: str, data: Any) -> None:
        """Send what stays true until it changes: only then, and to pages that come or have missed it."""
        event = sse(name, data)
        if event != self._standing.get(name):
            self._standing[name] = event
            self._tell(event)

    # -- the scheduler ------------------------------------------------------------------------------------------------
    async def _follow_scheduler(self) -> None:
        while True:
            began_s = time.monotonic()
            pause_s = STATE_EVERY_S
            try:
                state = await self.ask()
            except ApiError as error:
                if not self._away:
                    self._tell(sse("away", {"message": error.message}))
                self._away, pause_s = error.message, VITALS_EVERY_S
            else:
                self._show(state, again=bool(self._away))
                self._away = ""
                pause_s = min(max(STATE_EVERY_S, state.took_s / SCHEDULER_SHARE), STATE_AT_LEAST_S)
            await asyncio.sleep(max(0.0, began_s + pause_s - time.monotonic()))

    async def ask(self) -> SchedulerState:
        """Query the scheduler's state, and what has happened since the last query."""
        epoch, steps, over = self._seen

        def query(serial: int) -> StateRequested:
            return StateRequested(
                ingress=self.queries.address, serial=serial, epoch=epoch, steps_seen=steps, over_seen=over
            )

        state = await self.queries.ask(SchedulerState, query)
        self._seen = (state.epoch, state.steps_seen, state.over_seen)
        return state

    async def report(self) -> dict[str, Any]:
        """Actors, streams and the scheduler's picture, once; of what does not answer, why."""
        told: dict[str, Any] = {}
        try:
            told["actors"] = self.roster.rows(await self._snapshots(), time.time())
            told["streams"] = await stream_lengths(self._bus, self._names, self._leases(), self.queries.address)
        except BusUnavailable as error:
            told["bus_error"] = str(error)
        try:
            state = await self.queries.ask(
                SchedulerState, lambda serial: StateRequested(ingress=self.queries.address, serial=serial)
            )
            told["scheduler"] = picture(state)
        except ApiError as error:
            told["scheduler"] = {"error": error.message}
        return told

    def _show(self, state: SchedulerState, *, again: bool) -> None:
        """Send changes to all pages, and everything to new ones. ``again``: the pages believe that the scheduler does
        not answer."""
        told = self.board.update(state)
        is_due = self._is_due("state", changed=told.pop("changed") or again)
        event = sse("state", told) if is_due else b""
        lost = [watcher for watcher in self._watchers if watcher.lost]
        whole = sse("state", {**(self.board.whole() or {}), "whole": True}) if lost else b""
        for watcher in self._watchers:
            if watcher.lost or is_due:
                watcher.tell(whole if watcher.lost else event)
            if watcher.behind:
                watcher.tell(b"".join(self._standing.values()))
            watcher.lost = watcher.behind = False

    # -- the actors ---------------------------------------------------------------------------------------------------
    async def _follow_actors(self) -> None:
        spans, streams = self.history.spans(), list[dict[str, Any]]()
        while True:
            now_s, found = time.time(), None
            self._tell_change("incidents", {"incidents": self.roster.chronicle.newest()})
            snapshots: dict[str, Mapping[str, Any] | None] = {}
            try:
                snapshots = await self._snapshots()
                streams = await stream_lengths(self._bus, self._names, self._leases(), self.queries.address)
            except BusUnavailable:
                pass  # that is what is missing
            else:
                found = spans.next(self._summed(snapshots, now_s))
            actors = self.roster.rows(snapshots, now_s)
            state = {"missing": list(self._missing()), "held": hold_of(self._leases())}
            self._tell_news("actors", now_s, {"actors": actors, "streams": streams, **state})
            if found is not None:
                self._tell_news("vitals", now_s, {"figures": found})
            await asyncio.sleep(VITALS_EVERY_S)

    async def _follow_failures(self) -> None:
        while True:
            with suppress(BusUnavailable):
                self._tell_change("failures", failures_of(await self.history.read(FAILURES_S)))
            await asyncio.sleep(VITALS_EVERY_S if self.history.is_kept_here else STORE_EVERY_S)

    async def _snapshots(self) -> dict[str, Mapping[str, Any] | None]:
        """The metrics of all live actors by ``kind:name``."""
        keys = list(dict.fromkeys(map(key_of, self._leases())))
        others = [key for key in keys if key != f"ingress:{self._own_name}"]
        read: Sequence[Mapping[str, Any] | None] = []
        if others:
            read = await self._bus.get_state(*(metrics_state(*key.split(":", 1)) for key in others))
        return {**dict(zip(others, read, strict=True)), f"ingress:{self._own_name}": self._own_snapshot()}

    async def _totals(self) -> Totals:
        return self._summed(await self._snapshots(), time.time())

    def _summed(self, snapshots: Mapping[str, Mapping[str, Any] | None], now_s: float) -> Totals:
        """What the actors report, added up; who was resumed meanwhile is written down."""
        totals = total(snapshots.values(), now_s)
        self.roster.chronicle.resumed(totals.values.get(RESUMED, 0.0), now_s)
        return totals

    def _is_first(self) -> bool:
        """Whether this ingress keeps the history."""
        names = [actor_of(lease) for lease in self._leases() if lease.kind == "ingress"]
        return not names or min(names) == self._own_name


def picture(state: SchedulerState) -> dict[str, Any]:
    """Executors, and requests one by one, in words."""
    rows = state.requests.reshape(-1, len(REQUEST_COLUMNS)).tolist()
    requests = zip(state.request_ids, rows, strict=True)
    return {
        "epoch": state.epoch,
        "at_s": state.at_s,
        "took_s": state.took_s,
        "num_waiting": state.num_waiting,
        "replicas": [asdict(replica) for replica in state.replicas],
        "requests": [{"id": each, **dict(zip(REQUEST_COLUMNS, row, strict=True))} for each, row in requests],
    }


def sse(name: str, data: Any) -> bytes:
    """One named event."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
