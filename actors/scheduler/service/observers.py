"""Answers observers: clients that request the scheduler's state over ``control`` and receive it in their mailbox."""

from __future__ import annotations

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import BlocksPulled, Output, RequestOver, ToReplica
from pagebus.actors.scheduler.service.snapshot import Snapshot
from pagebus.actors.telemetry.steady_clock import steady_time_s
from pagebus.bus.messages import BlockRequested, StateRequested, StepResult
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names


class Observers:
    """Collects data while there are observers, and answers them. ``now_s`` is steady time."""

    def __init__(self, core: Core, outbox: Outbox, names: Names) -> None:
        self._snapshot = Snapshot(core)
        self._outbox = outbox
        self._names = names
        self._asked: list[StateRequested | BlockRequested] = []

    def ask(self, question: StateRequested | BlockRequested) -> None:
        """Queue a question; it is answered once all inputs before it have been handled and planned."""
        self._asked.append(question)

    def is_looked_at(self, now_s: float) -> bool:
        """Whether outputs must be passed to :meth:`decided`."""
        return self._snapshot.is_watched(now_s)

    def result_arrived(self, replica: str, result: StepResult) -> None:
        """Note a result that the core has not handled yet."""
        now_s = steady_time_s()
        if self._snapshot.is_watched(now_s):
            self._snapshot.result_arrived(replica, result, now_s)

    def decided(self, output: Output, now_s: float) -> None:
        """Note an output of the core."""
        match output:
            case ToReplica(replica, plan):
                self._snapshot.planned(replica, plan)
            case BlocksPulled(replica, blocks):
                self._snapshot.pulled(replica, blocks)
            case RequestOver(_, request) if request is not None:
                self._snapshot.over(request, now_s)

    def answer(self, now_s: float) -> None:
        """Answer all queued questions."""
        while self._asked:
            question = self._asked.pop(0)
            if isinstance(question, BlockRequested):
                self._outbox.publish(self._names.replies(question.ingress), self._snapshot.block(question))
            else:
                self._outbox.publish(self._names.replies(question.ingress), self._snapshot.build(question, now_s))
