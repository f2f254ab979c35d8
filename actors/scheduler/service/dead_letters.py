"""Dead letters: messages and requests that schedulers cannot process.

The message is stored as a dead letter with the reason, and its client gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from pagebus.actors.runtime.actor import describe
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.scheduler.service.blame import MOST_BLAMES, blamed
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.scheduler.service.work_stream import WorkStream
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import Bus, BusError, Entry
from pagebus.bus.messages import RequestBlamed, RequestFailed, TokenizedRequest
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names

STAGE = "scheduler"


class DeadLetters:
    """Gives up messages and requests. Never waits: work that waits for the bus is spawned as a task.

    Attributes:
        blamed: by id, live requests that schedulers have failed on.
    """

    def __init__(
        self,
        bus: Bus,
        names: Names,
        outbox: Outbox,
        work: WorkStream,
        blamed: dict[str, RequestBlamed],
        *,
        bus_retry: BusRetry,
        metrics: SchedulerMetrics,
        log: Log,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.blamed = blamed
        self._bus = bus
        self._names = names
        self._outbox = outbox
        self._work = work
        self._bus_retry = bus_retry
        self._metrics = metrics
        self._log = log
        self._spawn = spawn

    def blame(self, error: BaseException) -> RequestBlamed | None:
        """The journal entry about the request that caused ``error``; None if no request did."""
        request = None if isinstance(error, BusError) else blamed(error)
        if request is None:
            return None
        times = self.blamed[request.id].times + 1 if request.id in self.blamed else 1
        self._log.error("request blamed", request_id=request.id, times=times)
        return RequestBlamed(request_id=request.id, reason=describe(error), times=times)

    def verdict(self, request_id: str) -> str:
        """Why a request is not tried again; "" if it is."""
        blame = self.blamed.get(request_id)
        return blame.reason if blame is not None and blame.times >= MOST_BLAMES else ""

    def over(self, request_id: str) -> None:
        """Forget a request that is over."""
        self.blamed.pop(request_id, None)

    def give_up(self, entry: Entry, reason: str, *, others: Iterable[str] = ()) -> None:
        """Give up an entry: store it as a dead letter and send errors to its ingress, if known, and to those in
        ``others``."""
        message = entry.message
        request_id = getattr(message, "request_id", None)
        self._log.error("dead letter", stream=entry.stream, id=str(entry.id), request_id=request_id, reason=reason)
        if isinstance(message, TokenizedRequest):
            self._work.requests.pop(message.request_id, None)
            self.over(message.request_id)
            text = "The server failed to schedule this request."
            failed = RequestFailed(request_id=message.request_id, status=500, error_type="internal_error", message=text)
            for ingress in (message.ingress, *others):
                self._outbox.publish(self._names.replies(ingress), failed)
        self._bury(entry, reason)

    def given_up(self, request_id: str, reason: str) -> None:
        """Store the entry of a request that the core has given up and answered. Its end, which follows, settles it,
        unless the request has been asked for anew."""
        entry = self._work.requests[request_id]
        self._log.error("dead letter", id=str(entry.id), request_id=request_id, reason=reason)
        self._bury(entry, reason, settles=False)

    def _bury(self, entry: Entry, reason: str, *, settles: bool = True) -> None:
        self._metrics.dead.inc()
        self._spawn(self._keep(entry, reason, settles), "dead letter")

    async def _keep(self, entry: Entry, reason: str, settles: bool) -> None:
        await self._bus_retry.until_taken(lambda: self._bus.dead_letter(STAGE, entry, reason), "dead letters")
        if settles and entry.stream in self._work.streams:
            self._work.settled(entry)
