"""The scheduler's decisions, as a state machine: inputs and the time in, messages out.

No IO, clock or randomness in here: the same inputs give the same outputs, so that the core can be tested and simulated.
:meth:`Core.handle` takes one input in, :meth:`Core.plan` decides what happens next; between two plans any number of
inputs may come. What happens to requests is with :class:`Lifecycle`, who runs where with :class:`Planner`, and what
their clients still have to get with :class:`Delivery`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.delivery import Delivery
from pagebus.actors.scheduler.core.lifecycle import Lifecycle
from pagebus.actors.scheduler.core.planner import Planner
from pagebus.actors.scheduler.events import (
    CachesReset,
    DetokenizerLost,
    DetokenizersLive,
    HostTierGrown,
    IngressLost,
    Input,
    Output,
    ReplicaJoined,
    ReplicaLost,
    ReplicaResult,
    ReplicaSuspended,
    WorkHeld,
)
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.sequence_output import SequenceOutput
from pagebus.bus.messages import (
    HOLD_ABORT,
    HOLD_KEEP,
    AbortRequest,
    AlsoReads,
    CancelRequest,
    RequestsDone,
    StopSequence,
    TokenizedRequest,
)


class Core:
    """The whole state of one scheduler."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._out: list[Output] = []
        self.delivery = Delivery(self._out.append, config.resume_timeout_s)
        self.planner = Planner(config, self.delivery, self._out)
        self.lifecycle = Lifecycle(config, self.planner, self.delivery, self._out)
        self.replicas = self.planner.replicas
        self.waiting = self.planner.waiting
        self.requests = self.lifecycle.requests

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return sum(len(replica.slots) for replica in self.replicas.values())

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks up, so far."""
        return self.planner.num_preemptions

    @property
    def is_idle(self) -> bool:
        """No request runs or waits, and no step is in flight."""
        return not self.requests and not any(replica.in_flight for replica in self.replicas.values())

    @property
    def held(self) -> str:
        """How an operator holds the work."""
        return self.lifecycle.held

    @property
    def at_rest(self) -> bool:
        """Whether the work is held, and no step is in flight any more."""
        return self._stands_still and not any(replica.in_flight for replica in self.replicas.values())

    @property
    def _stands_still(self) -> bool:
        """Whether nothing is to be planned: at once, or once requests of clients have ended (jobs can wait)."""
        if self.held in ("", HOLD_KEEP):
            return self.held == HOLD_KEEP
        return all(request.priority_class == JOB for request in self.requests.values())

    @property
    def is_forgettable(self) -> bool:
        """There is no request, not even one that is only kept: a successor would have nothing to know."""
        return not self.requests and not self.delivery.finished

    def knows(self, request_id: str) -> bool:
        """Whether there is such a request, if only kept."""
        return self.attempt_of(request_id) is not None

    def attempt_of(self, request_id: str) -> str | None:
        """Which attempt was the last of those that clients listen to; None if there is no such request."""
        request = self.requests.get(request_id) or self.delivery.finished.get(request_id)
        return None if request is None else request.readers.newest.attempt

    def is_read_by(self, request_id: str, attempt: str) -> bool:
        """Whether there is such a request, and a client listens to this attempt at it."""
        request = self.requests.get(request_id) or self.delivery.finished.get(request_id)
        return request is not None and request.readers.of(attempt) is not None

    def leftovers(self) -> dict[str, int]:
        """What is held, by name; all 0 when idle."""
        held = {"requests": len(self.requests), "waiting": len(self.waiting), "finished": len(self.delivery.finished)}
        for name, replica in self.replicas.items():
            held[f"{name}: slots"] = len(replica.slots)
            held[f"{name}: blocks"] = replica.pool.num_blocks - replica.pool.num_free
            held[f"{name}: host blocks"] = replica.host_tier.num_held
            held[f"{name}: steps in flight"] = len(replica.in_flight)
        return held

    def skip_steps(self, replica: str, step: int) -> None:
        """Steps up to this one of a replica that has not joined yet are used up."""
        self.planner.next_steps[replica] = step + 1

    def readmit(
        self, message: TokenizedRequest, outputs: Mapping[int, SequenceOutput], others: Iterable[AlsoReads] = ()
    ) -> None:
        """A request that a scheduler before this one has accepted, with what is known of its choices, and of others
        that read it."""
        self.lifecycle.readmit(message, outputs, others)

    def handle(self, message: Input) -> None:
        """Take one input in.

        Raises:
            ProtocolError: a result that cannot be true; nothing has changed.
            ValueError: a replica that cannot be used with these settings; nothing has changed.
        """
        match message:
            case ReplicaResult():
                self._take_result(message)
            case TokenizedRequest():
                self.lifecycle.submit(message)
            case AbortRequest():
                self.lifecycle.leave(message)
            case CancelRequest():
                self.lifecycle.cancel(message.request_id)
            case RequestsDone():
                for request_id, attempt in zip(message.request_ids, message.attempts, strict=True):
                    self.lifecycle.settle(request_id, attempt)
            case StopSequence():
                self.lifecycle.stop(message)
            case ReplicaJoined():
                self.planner.join(message)
                self.lifecycle.refuse_misfits()
            case HostTierGrown():
                if message.replica in self.replicas:
                    self.replicas[message.replica].host_tier.grow(message.num_host_blocks)
            case ReplicaSuspended():
                self.planner.suspend(message.replica)
            case ReplicaLost():
                for request in self.planner.lose(message.replica, message.reason):
                    self.lifecycle.give_up(request)
                for detokenizer in message.deaf:
                    self.lifecycle.lose_listener(detokenizer)
            case IngressLost():
                self.lifecycle.lose_ingress(message.ingress)
            case DetokenizersLive():
                self._set_detokenizers(message.names)
            case WorkHeld():
                self._hold(message.mode)
            case CachesReset():
                self.planner.reset_caches(host=message.host, running=message.running)
            case DetokenizerLost():
                self._set_detokenizers(each for each in self.delivery.detokenizers if each != message.detokenizer)
                self.lifecycle.lose_listener(message.detokenizer)

    def plan(self, now_s: float) -> list[Output]:
        """Everything to be sent now, in this order: the answers to what was taken in, then the plans for every replica
        whose pipeline has room, each after the SequenceStarted of the sequences that enter with it, then what has ended
        and is told again."""
        return [output for part in self.plan_in_turns(now_s) for output in part]

    def plan_in_turns(self, now_s: float) -> Iterator[list[Output]]:
        """The same in parts with at most one plan for each replica, so that the first can be on its way while the ones
        behind it are made. Inputs have to wait until the last part was asked for."""
        for request_id in self.delivery.expired(now_s):
            self.lifecycle.abort(request_id)
        self.planner.frozen = bool(self.held) and self._stands_still
        for _ in self.planner.plan(now_s):
            yield self._take_out()
        self.delivery.announce_ended()
        yield self._take_out()

    def _take_out(self) -> list[Output]:
        out = self._out.copy()
        self._out.clear()
        return out

    def _take_result(self, message: ReplicaResult) -> None:
        if message.replica not in self.replicas or message.result.scheduler_epoch != self.config.epoch:
            return  # of a replica that was given up, or for another scheduler
        ended = self.planner.take_result(message)
        if len(message.result.logprob_rows):
            self.lifecycle.keep_scores(message.result)
        for sequence, end in ended:
            self.lifecycle.finish(sequence, end, message.result.done_s)

    def _hold(self, mode: str) -> None:
        self.lifecycle.held = mode
        self.planner.touch_all()
        if mode == HOLD_ABORT:
            for request in [each for each in self.requests.values() if each.priority_class != JOB]:
                self.lifecycle.cancel(request.id, held=True)

    def _set_detokenizers(self, names: Iterable[str]) -> None:
        self.delivery.detokenizers = tuple(sorted(names))
        if not self.delivery.detokenizers:
            self.planner.take_back()

    def check_integrity(self) -> None:
        """All owners agree with one another.

        Raises:
            AssertionError: it is not so.
        """
        self.planner.check_integrity()
        self.lifecycle.check_integrity()
        self.delivery.check_integrity(self.requests.values())
