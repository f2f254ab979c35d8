"""The scheduler's decisions as a state machine: inputs and the time in, messages out.

The core has no IO, clock or randomness. The same inputs give the same outputs, so it can be tested and simulated.
:meth:`Core.handle` applies one input and :meth:`Core.plan` plans; any number of inputs may come between two plans.
:class:`Lifecycle` owns requests, :class:`Planner` owns placement and steps, and :class:`Delivery` owns the output that
clients have not received.
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
    AdapterRead,
    AlsoReads,
    CancelRequest,
    DiskReport,
    PullReport,
    RequestsDone,
    StopSequence,
    TokenizedRequest,
)


class Core:
    """The complete state of one scheduler."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._out: list[Output] = []
        self.delivery = Delivery(self._out.append, config.resume_timeout_s)
        self.planner = Planner(config, self.delivery, self._out)
        self.lifecycle = Lifecycle(config, self.planner, self.delivery, self._out)
        self.replicas = self.planner.replicas
        self.waiting = self.planner.waiting
        self.requests = self.lifecycle.requests
        self._done_s = 0.0
        """When the step of the newest result was done."""

    @property
    def num_running(self) -> int:
        """Number of sequences that have a slot."""
        return sum(len(replica.slots) for replica in self.replicas.values())

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions for want of blocks, so far."""
        return self.planner.num_preemptions

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits and no step is in flight."""
        return not self.requests and not any(replica.in_flight for replica in self.replicas.values())

    @property
    def held(self) -> str:
        """The mode in which an operator holds the work, or ""."""
        return self.lifecycle.held

    @property
    def at_rest(self) -> bool:
        """Whether the work is held and no step is in flight any more."""
        return self._stands_still and not any(replica.in_flight for replica in self.replicas.values())

    @property
    def _stands_still(self) -> bool:
        """Whether planning is paused: at once, or once only jobs are left, according to the mode of the hold."""
        if self.held in ("", HOLD_KEEP):
            return self.held == HOLD_KEEP
        return all(request.priority_class == JOB for request in self.requests.values())

    @property
    def is_forgettable(self) -> bool:
        """Whether there is no request, not even a finished one, so that a successor needs no state."""
        return not self.requests and not self.delivery.finished

    @property
    def waits_for_time(self) -> bool:
        """Whether something is to be done once time has passed, even if nothing else happens."""
        planner = self.planner
        reads = any(replica.disk_tier.is_awaited for replica in planner.fleet.with_disks)
        return self.delivery.is_waiting or reads or planner.pulls.is_awaited

    def knows(self, request_id: str) -> bool:
        """Whether the request exists, running or finished."""
        return self.attempt_of(request_id) is not None

    def attempt_of(self, request_id: str) -> str | None:
        """The latest attempt of a request's clients; None if there is no such request."""
        request = self.requests.get(request_id) or self.delivery.finished.get(request_id)
        return None if request is None else request.readers.newest.attempt

    def is_read_by(self, request_id: str, attempt: str) -> bool:
        """Whether the request exists and a client reads this attempt."""
        request = self.requests.get(request_id) or self.delivery.finished.get(request_id)
        return request is not None and request.readers.of(attempt) is not None

    def leftovers(self) -> dict[str, int]:
        """Counts of everything held, by name; all 0 when idle."""
        held = {"requests": len(self.requests), "waiting": len(self.waiting), "finished": len(self.delivery.finished)}
        for name, replica in self.replicas.items():
            held[f"{name}: slots"] = len(replica.slots)
            held[f"{name}: blocks"] = replica.pool.num_blocks - replica.pool.num_free
            held[f"{name}: blocks"] -= len(set(self.planner.pulls.owned(replica)))
            held[f"{name}: host blocks"] = replica.host_tier.num_held - len(
                {*replica.disk_tier.owned, *self.planner.pulls.owned_hosts(replica)}
            )
            held[f"{name}: steps in flight"] = len(replica.in_flight)
            held[f"{name}: adapters"] = len(replica.adapters.loaded)
        return held

    def skip_steps(self, replica: str, step: int) -> None:
        """Mark steps up to this one as used, for a replica that has not joined yet."""
        self.planner.next_steps[replica] = step + 1

    def readmit(
        self, message: TokenizedRequest, outputs: Mapping[int, SequenceOutput], others: Iterable[AlsoReads] = ()
    ) -> None:
        """Admit a request that an earlier scheduler had accepted, with the recovered output of its choices and its
        other readers."""
        self.lifecycle.readmit(message, outputs, others)

    def handle(self, message: Input) -> None:
        """Apply one input.

        Raises:
            ProtocolError: a result contradicts the plans; nothing has changed.
            ValueError: a replica does not fit these settings; nothing has changed.
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
                self._settle(message)
            case StopSequence():
                self.lifecycle.stop(message, self._done_s)
            case AdapterRead():
                self._adapter_read(message)
            case DiskReport():
                self.planner.disk_report(message, self.config.epoch)
            case PullReport():
                self.planner.pull_report(message, self.config.epoch)
            case ReplicaJoined():
                self.planner.join(message)
                self.lifecycle.refuse_misfits()
            case HostTierGrown():
                self.planner.grow_host_tier(message.replica, message.num_host_blocks)
            case ReplicaSuspended():
                self.planner.suspend(message.replica, drains=message.drains)
            case ReplicaLost():
                self._lose_replica(message)
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
        """All messages to send now, in order: answers to handled inputs; plans for each replica whose pipeline has
        room, each preceded by the SequenceStarted of its entering sequences; then announcements of ended sequences."""
        return [output for part in self.plan_in_turns(now_s) for output in part]

    def plan_in_turns(self, now_s: float) -> Iterator[list[Output]]:
        """The same in parts with at most one plan per replica, so that the first can be sent while later ones are
        built. No input may be handled before the last part."""
        for request_id in self.delivery.expired(now_s):
            self.lifecycle.abort(request_id)
        for _ in self.planner.plan(now_s, frozen=bool(self.held) and self._stands_still):
            yield self._take_out()
        self.delivery.announce_ended()
        yield self._take_out()

    def _take_out(self) -> list[Output]:
        out = self._out.copy()
        self._out.clear()
        return out

    def _adapter_read(self, message: AdapterRead) -> None:
        if error := self.planner.adapter_read(message, self.config.epoch):
            self.lifecycle.fail_adapter(message.digest, error)
        elif message.num_blocks:  # with that many fewer blocks, some may fit nowhere
            self.lifecycle.refuse_misfits(message.digest)

    def _take_result(self, message: ReplicaResult) -> None:
        replica = self.replicas.get(message.replica)
        if replica is None or message.result.scheduler_epoch != self.config.epoch:
            return  # of a replica that was given up, or for another scheduler
        ended = replica.take_result(message.result)
        self._done_s = message.result.done_s
        if self.planner.auto_roles is not None:
            self.planner.auto_roles.demand.done(replica.name, message.result)
        self.planner.fleet.touch(replica)
        if len(message.result.logprob_rows):
            self.lifecycle.keep_scores(message.result)
        for sequence, end in ended:
            self.lifecycle.finish(sequence, end, message.result.done_s)

    def _lose_replica(self, message: ReplicaLost) -> None:
        for request in self.planner.lose(message.replica, message.reason):
            self.lifecycle.give_up(request)
        for detokenizer in message.deaf:
            self.lifecycle.lose_listener(detokenizer)

    def _settle(self, message: RequestsDone) -> None:
        for request_id, attempt in zip(message.request_ids, message.attempts, strict=True):
            self.lifecycle.settle(request_id, attempt, self._done_s)

    def _hold(self, mode: str) -> None:
        self.lifecycle.hold(mode)
        self.planner.touch_all()
        if mode == HOLD_ABORT:
            for request in [each for each in self.requests.values() if each.priority_class != JOB]:
                self.lifecycle.cancel(request.id, held=True)

    def _set_detokenizers(self, names: Iterable[str]) -> None:
        self.delivery.use(names)
        if not self.delivery.detokenizers:
            self.planner.take_back()

    def check_integrity(self) -> None:
        """The states of planner, lifecycle and delivery agree.

        Raises:
            AssertionError: they do not.
        """
        self.planner.check_integrity()
        self.lifecycle.check_integrity()
        self.delivery.check_integrity(self.requests.values())
