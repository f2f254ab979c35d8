"""Handles inputs of the scheduler in order: work entries, results of replicas, and membership events."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagebus.actors.runtime.actor import describe
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import (
    DetokenizerLost,
    DetokenizersLive,
    Input,
    ProtocolError,
    ReplicaJoined,
    ReplicaLost,
    ReplicaResult,
)
from pagebus.actors.scheduler.recovery.remains import Remains
from pagebus.actors.scheduler.recovery.takeover import Recovered
from pagebus.actors.scheduler.service.dead_letters import DeadLetters
from pagebus.actors.scheduler.service.detokenizers import Detokenizers
from pagebus.actors.scheduler.service.membership import Membership
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.scheduler.service.observers import Observers
from pagebus.actors.scheduler.service.result_streams import ResultStreams
from pagebus.actors.scheduler.service.steering import Steering
from pagebus.actors.scheduler.service.trimming import Trimmer
from pagebus.actors.scheduler.service.work_stream import WorkStream
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import Entry
from pagebus.bus.messages import (
    AbortRequest,
    AdapterRead,
    BlockRequested,
    CacheResetRequested,
    CancelRequest,
    DiskReport,
    HoldRequested,
    PullReport,
    ReplicaFenced,
    RequestsDone,
    StateRequested,
    StepResult,
    StopSequence,
    TokenizedRequest,
)
from pagebus.bus.streams import Names


@dataclass(slots=True, kw_only=True)
class Intake:
    """Handles one input after the other, in order of arrival. Never waits."""

    core: Core
    names: Names
    work: WorkStream
    results: ResultStreams
    recovered: Recovered
    """Requests of a predecessor that have not been readmitted yet."""
    membership: Membership
    detokenizers: Detokenizers
    observers: Observers
    steering: Steering
    dead_letters: DeadLetters
    trimmer: Trimmer
    remains: Remains
    metrics: SchedulerMetrics
    log: Log

    def forget_recovered(self) -> None:
        """Nothing of a predecessor is left to be readmitted."""
        self.recovered = Recovered()

    def handle(self, item: Entry | Input) -> None:
        """Handle one stream entry or event."""
        if not isinstance(item, Entry):
            self._take_event(item)
        elif isinstance(item.message, TokenizedRequest | AbortRequest | CancelRequest | StopSequence | RequestsDone):
            try:
                self._take_work(item, item.message)
            except Exception as error:
                if self.core.knows(getattr(item.message, "request_id", "")):
                    raise  # the core may hold half of it; a successor starts from a consistent state
                self.dead_letters.give_up(item, describe(error))
        elif isinstance(item.message, StepResult | ReplicaFenced):
            self._take_result(item, item.message)
        elif isinstance(item.message, AdapterRead | DiskReport | PullReport):
            self.core.handle(item.message)
            self.work.settled(item)
        elif isinstance(item.message, StateRequested | BlockRequested):
            self.observers.ask(item.message)
            self.work.settled(item)
        elif isinstance(item.message, HoldRequested | CacheResetRequested):
            self.steering.ask(item.message)
            self.work.settled(item)
        else:
            self.dead_letters.give_up(item, item.error or f"unexpected {type(item.message).__name__}")

    def _take_work(
        self, entry: Entry, message: TokenizedRequest | AbortRequest | CancelRequest | StopSequence | RequestsDone
    ) -> None:
        if not isinstance(message, TokenizedRequest):
            self.core.handle(message)
            self.work.settled(entry)
            return
        self.membership.expect((message.ingress,))
        if (known := self.work.requests.get(message.request_id)) is not None:
            if known.id == entry.id:
                return  # handed out twice: Redis has forgotten the first time in a failover
            self.core.handle(message)
            same = self.core.is_read_by(message.request_id, message.attempt)
            self.work.asked_again(message.request_id, entry, same=same)
        else:
            self.work.requests[message.request_id] = entry
            if entry.deliveries > 1:
                self._readmit(entry, message)
            else:
                self.core.handle(message)

    def _readmit(self, entry: Entry, message: TokenizedRequest) -> None:
        """Admit a request again that a predecessor had accepted, unless it is blamed for that scheduler's failure."""
        message, others, outputs = self.recovered.claim(message)
        ingresses = [message.ingress, *(each.ingress for each in others)]
        self.membership.expect(ingresses)  # where its clients had moved to, and may have died since
        if reason := self.dead_letters.verdict(message.request_id):
            self.dead_letters.give_up(replace(entry, message=message), reason, others=ingresses[1:])
        else:
            self.core.readmit(message, outputs, others)

    def _take_result(self, entry: Entry, message: StepResult | ReplicaFenced) -> None:
        name = self.results.replica_of(entry)
        member = self.membership.members.get(name)
        if member is None:
            return
        self.results.taken(entry)
        if entry.id.epoch < member.epoch:
            return  # of an executor that was replaced long ago
        if isinstance(message, ReplicaFenced) or entry.id.epoch > member.epoch:
            reason, error = "replaced", ""
            if isinstance(message, ReplicaFenced):
                reason, error = message.reason, message.error
                self.membership.refused[name] = entry.id.epoch  # one that fails says so before it gives its lease back
            self.metrics.lost(name, error)
            self._take_event(ReplicaLost(name, reason, self.membership.deaf_to(name)))
            return
        self.observers.result_arrived(name, message)
        try:
            self.core.handle(ReplicaResult(name, message))
        except ProtocolError as error:
            if member.fenced:
                return  # results after a false one are false, too
            self.log.error("false result: the executor is shut out", replica=name, error=str(error))
            self.metrics.refused_results.inc()
            self.membership.distrust(name, str(error))

    def _take_event(self, event: Input) -> None:
        match event:
            case ReplicaJoined(replica=name):
                self.remains.here("executor", name)
            case ReplicaLost(name):
                self.remains.gone("executor", name)
                self.membership.lost(name)
                self.results.leave(name)
                replica = self.core.replicas.get(name)
                if replica is not None:
                    self.metrics.forget(replica)
                    self.trimmer.replica_lost(name, replica.step)
            case DetokenizerLost(name):
                self.remains.gone("detokenizer", name)
                self.trimmer.detokenizer_lost(self.names.sequences(name), self.detokenizers.lost(name))
            case DetokenizersLive(names):
                for name in names:
                    self.remains.here("detokenizer", name)
                    self.detokenizers.lead(name)
            case _:
                pass
        try:
            self.core.handle(event)
        except ValueError as error:
            assert isinstance(event, ReplicaJoined)
            self.log.error("executor cannot be used", replica=event.replica, error=str(error))
            self.membership.refused[event.replica] = event.epoch
            self.membership.lost(event.replica)
            self.results.leave(event.replica)
            self.remains.gone("executor", event.replica)
