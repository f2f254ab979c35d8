"""Those who look at the deployment: they ask over ``control``, and are told in their mailbox."""

from __future__ import annotations

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import Output, RequestOver, ToReplica
from pagebus.actors.scheduler.service.snapshot import Snapshot
from pagebus.actors.telemetry.steady_clock import steady_time_s
from pagebus.bus.messages import BlockRequested, StateRequested, StepResult
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names


class Observers:
    """Keeps what they will want to know as long as somebody looks, and answers. ``now_s`` is steady time."""

    def __init__(self, core: Core, outbox: Outbox, names: Names) -> None:
        self._snapshot = Snapshot(core)
        self._outbox = outbox
        self._names = names
        self._asked: list[StateRequested | BlockRequested] = []

    def ask(self, question: StateRequested | BlockRequested) -> None:
        """Answered once everything before it has been taken in and planned."""
        self._asked.append(question)

    def is_looked_at(self, now_s: float) -> bool:
        """Whether :meth:`decided` has to be told."""
        return self._snapshot.is_watched(now_s)

    def result_arrived(self, replica: str, result: StepResult) -> None:
        """A result has come, and the core has not taken it in yet."""
        now_s = steady_time_s()
        if self._snapshot.is_watched(now_s):
            self._snapshot.result_arrived(replica, result, now_s)

    def decided(self, output: Output, now_s: float) -> None:
        """The core has decided this."""
        match output:
            case ToReplica(replica, plan):
                self._snapshot.planned(replica, plan)
            case RequestOver(_, request) if request is not None:
                self._snapshot.over(request, now_s)

    def answer(self, now_s: float) -> None:
        """Tell those who have asked."""
        while self._asked:
            question = self._asked.pop(0)
            if isinstance(question, BlockRequested):
                self._outbox.publish(self._names.replies(question.ingress), self._snapshot.block(question))
            else:
                self._outbox.publish(self._names.replies(question.ingress), self._snapshot.build(question, now_s))
