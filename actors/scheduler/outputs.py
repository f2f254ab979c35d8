"""Routes the core's outputs to the outbox, the log and the metrics."""

from __future__ import annotations

from collections import Counter

from pagebus.actors.scheduler.core.announcements import times_of
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import (
    BlocksPulled,
    Note,
    Output,
    Preempted,
    RequestGivenUp,
    RequestOver,
    ToDetokenizer,
    ToIngress,
    ToJournal,
    ToReplica,
)
from pagebus.actors.scheduler.recovery.checkpoints import Checkpoints
from pagebus.actors.scheduler.service.dead_letters import DeadLetters
from pagebus.actors.scheduler.service.detokenizers import Detokenizers
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.scheduler.service.work_stream import WorkStream
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.messages import SequenceStarted
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names

SHOWN_IDS = 8


class OutputRouter:
    """Routes each output of the core to its destination. Never waits.

    Args:
        logs_requests: whether each started sequence gets a log line.
    """

    def __init__(
        self,
        names: Names,
        outbox: Outbox,
        *,
        core: Core,
        detokenizers: Detokenizers,
        checkpoints: Checkpoints,
        work: WorkStream,
        dead_letters: DeadLetters,
        metrics: SchedulerMetrics,
        log: Log,
        logs_requests: bool,
    ) -> None:
        self._names = names
        self._outbox = outbox
        self._core = core
        self._detokenizers = detokenizers
        self._checkpoints = checkpoints
        self._work = work
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._log = log
        self._logs_requests = logs_requests
        self._stopped: dict[str, list[Preempted]] = {}

    def route(self, output: Output) -> None:
        """Route one output, after all earlier ones."""
        match output:
            case ToReplica(replica, plan):
                at = self._outbox.append(self._names.steps(replica), plan)
                assert at.index == plan.step, f"step {plan.step} of {replica} would be entry {at}"
                self._metrics.planned(replica, plan)
            case ToDetokenizer(detokenizer, message):
                self._detokenizers.tell(detokenizer, message)
                if self._logs_requests and isinstance(message, SequenceStarted):
                    sequence = {"sequence": message.sequence_id, "cached_tokens": message.num_cached_tokens}
                    self._log.info("started", request_id=message.request_id, **sequence)
            case ToIngress(ingress, failure):
                self._metrics.failed.inc()
                self._outbox.publish(self._names.replies(ingress), failure)
            case ToJournal(message):
                self._checkpoints.append(message)
            case RequestOver(request_id, request):
                if request is not None:
                    self._metrics.over(request)
                    if request.traced and not request.away:
                        for address in request.readers.addresses:
                            self._outbox.publish(self._names.replies(address), times_of(request))
                if not self._core.knows(request_id):  # else asked for anew in this turn: its newer entry stands
                    self._dead_letters.over(request_id)
                    self._work.over(request_id)
            case RequestGivenUp(request_id, reason):
                self._dead_letters.given_up(request_id, reason)
            case Preempted(why=why):
                self._stopped.setdefault(why, []).append(output)
            case BlocksPulled():
                pass
            case Note(event, fields):
                self._log.info(event, **fields)

    def log_preempted(self) -> None:
        """Log one line for all preemptions since the last call, one for all parked sequences, and one for all that
        were moved, with the replicas that they have left."""
        while self._stopped:
            event, stopped = self._stopped.popitem()
            times = Counter(each.request_id for each in stopped)
            shown = [request_id for request_id, _ in times.most_common(SHOWN_IDS)]
            replicas = sorted({each.replica for each in stopped})
            self._log.info(event, count=len(stopped), replicas=replicas, request_ids=shown)
