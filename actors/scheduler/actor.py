"""The scheduler actor: reads the bus, lets the core decide, writes the bus.

Tasks beside the loop read requests, results and leases into one inbox. The loop sleeps until something is in there,
takes in all of it, plans once, and hands the messages to the outbox; nothing on that way waits for the bus.

A request stays in its work stream until it is over. What else a successor has to know is in the journal, and the
results it needs are not trimmed before a checkpoint there has summed them up (:mod:`actors.scheduler.journal`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import replace
from typing import ClassVar

from actors.actor import Actor, describe
from actors.model_config import ModelConfig, resolve_model
from actors.patience import Patience
from actors.scheduler.checkpoints import Checkpoints
from actors.scheduler.config import CoreConfig
from actors.scheduler.core import Core
from actors.scheduler.detokenizers import Detokenizers
from actors.scheduler.events import (
    DetokenizerLost,
    DetokenizersLive,
    Input,
    Note,
    Output,
    ProtocolError,
    ReplicaJoined,
    ReplicaLost,
    ReplicaResult,
    RequestOver,
    ToDetokenizer,
    ToIngress,
    ToJournal,
    ToReplica,
)
from actors.scheduler.lookout import LOOK_S, Lookout
from actors.scheduler.membership import Membership
from actors.scheduler.meters import Meters
from actors.scheduler.observers import Observers
from actors.scheduler.poison import Poison
from actors.scheduler.results import Results
from actors.scheduler.takeover import MARK_STEP, Recovered, Takeover
from actors.scheduler.telling import times_of
from actors.scheduler.trimming import Trimmer
from actors.scheduler.work import Work
from actors.settings import Settings
from actors.spans import spans_of
from actors.steady_clock import steady_time_s
from bus.contract import FENCE_INDEX, Bus, Entry, EntryId
from bus.messages import (
    AbortRequest,
    BlockRequested,
    CancelRequest,
    ReplicaFenced,
    RequestsDone,
    SequenceStarted,
    StateRequested,
    StepResult,
    StopSequence,
    TokenizedRequest,
)
from bus.outbox import Outbox

LEASE = "leader"
EAGER_LOOK_S = 0.05
"""While there is no executor."""
HOUSEKEEPING_S = 1.0
MAX_UNSENT = 4096
"""Nothing is planned while more messages than this wait for the bus."""
TURNS_TO_PLAN = 2
"""Of the event loop: one for the loop below, one for the outbox."""
SHOWN_IDS = 8


class SchedulerActor(Actor):
    """The one scheduler of a deployment; a second one stands by. ``core`` decides."""

    kind: ClassVar[str] = "scheduler"

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self.core = Core(CoreConfig(block_size=settings.block_size))
        self._inbox: deque[Entry | Input] = deque()
        self._news = asyncio.Event()
        self._membership = Membership(self._put, self._fence)
        self._lookout = Lookout(bus, self._membership, settings.lease_ttl_s)
        self._patience = Patience(self.log, on_away=self._lookout.doubt)
        self._recovered = Recovered()
        self._preempted: Counter[str] = Counter()
        self._meters = Meters(self.metrics)
        self._spans = spans_of(settings, name)

    def lease_name(self) -> str:
        return LEASE

    def request_drain(self) -> None:
        super().request_drain()
        self._news.set()

    # -- life ---------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Learn the model's end tokens, take over, and start the tasks beside the loop."""
        path = await asyncio.to_thread(resolve_model, self.settings, weights=False)
        model = await asyncio.to_thread(ModelConfig.load, path)
        self.core = Core(CoreConfig.of(self.settings, model, self.epoch))
        self._outbox = Outbox(self.bus, self.epoch)
        self._detokenizers = Detokenizers(self.names, self._outbox)
        self._observers = Observers(self.core, self._outbox, self.names)
        self._trimmer = Trimmer(self.bus, self.names, self.epoch)
        self._work = Work(self.bus, self.names, f"{self.name}@{self.epoch}", self._outbox, self.confirm_lease)
        await self._patience.until_taken(self._work.create_groups, "groups")
        self._poison = Poison(
            self.bus, self.names, self._outbox, self._work,
            patience=self._patience, meters=self._meters, log=self.log, spawn=self.spawn,
        )  # fmt: skip
        self.spawn(self._outbox.run(), "outbox")
        await self._take_over()
        await self._patience.until_taken(self._claim_work, "work left behind")
        for name, once in (
            ("work", self._read_work),
            ("results", self._read_results),
            ("acks", self._work.acknowledge_next),
            ("leases", self._look),
            ("housekeeping", self._keep_house),
        ):
            self.spawn(self._patience.for_ever(once, name), name)

    async def _take_over(self) -> None:
        """Learn what the scheduler before this one left, down to the last token."""
        began_s = time.monotonic()
        takeover = Takeover(self.bus, self.names, self._outbox)
        await self._patience.until_taken(takeover.run, "takeover")
        ledger = takeover.ledger
        self._recovered = Recovered(ledger)
        self._poison.blamed = ledger.blamed
        self._results = Results(self.bus, self.names, takeover.read)
        self._checkpoints = Checkpoints(
            self.bus, self.names, self._outbox, end=takeover.journal_end, covered=ledger.positions
        )
        for replica in takeover.marks:
            self.core.skip_steps(replica, MARK_STEP)
            self._trimmer.replica_lost(replica, MARK_STEP)  # answered, or there is nobody who would
        for replica, end in takeover.read.items():
            if end.index == FENCE_INDEX:  # an executor that has failed may still have its lease
                self._membership.refused[replica] = end.epoch
                self._lookout.shut_out("executor", replica, end.epoch)
        self._membership.expect(ledger.ingresses, ledger.detokenizers)
        self._detokenizers.expect(ledger.detokenizers)
        if self._recovered:
            seconds = round(time.monotonic() - began_s, 3)
            self.log.info("took over", requests=len(self._recovered), replicas=sorted(takeover.read), seconds=seconds)

    async def serve(self) -> None:
        """Take in, plan, send, until draining and nothing is left to do."""
        while not (self.draining.is_set() and self.core.is_idle and not self._inbox):
            await self._news.wait()
            self._news.clear()
            await self.confirm_lease()
            if self._outbox.depth > MAX_UNSENT:
                await self._outbox.flush()
            taken_s = steady_time_s()
            while self._inbox:
                self._take(self._inbox.popleft())
            await self._plan(self._note_work("land", taken_s))

    async def drain(self) -> None:
        """Send what is queued, ack what was taken in, trim."""
        await self._outbox.flush()
        while self._work.has_settled:
            await self._patience.until_taken(self._work.acknowledge, "acks")
        await self._patience.until_taken(lambda: self._keep_house(pause_s=0.0), "housekeeping")

    async def bequeath(self, error: BaseException) -> None:
        """Tell the next scheduler which request this one has failed at, if it was one."""
        if hasattr(self, "_poison") and (blame := self._poison.blame(error)) is not None:
            self._checkpoints.append(blame)
            await self._outbox.flush()

    async def stop(self) -> None:
        """Store the spans, if they were asked for."""
        if self._spans is not None:
            self._spans.write()

    async def _plan(self, now_s: float) -> None:
        """Plan, and hand to the outbox, which sends the first plan of a replica while those behind it are made."""
        looked_at, began_s = self._observers.is_looked_at(now_s), now_s
        for part in self.core.plan_in_turns(now_s):
            for output in part:
                self._send(output)
                if looked_at:
                    self._observers.decided(output, now_s)
            began_s = self._note_work("plan", began_s)
            if part:
                await asyncio.sleep(0)
                began_s = steady_time_s()
        self._observers.answer(now_s)

    def _note_work(self, what: str, began_s: float) -> float:
        """A part of the loop's work is done; returns the time."""
        ended_s = steady_time_s()
        self._meters.busy.inc(ended_s - began_s)
        if self._spans is not None:
            self._spans.add(what, 0, began_s, ended_s)
        return ended_s

    def bus_restarted(self) -> None:
        """A scheduler that plans on what is lost would wait for ever. Its successor starts from what there is."""
        if hasattr(self, "_outbox"):
            self._outbox.bus_restarted()
            self._membership.bus_restarted()
        if hasattr(self, "_checkpoints"):
            self._checkpoints.bus_restarted()
            self._trimmer.bus_restarted()

    # -- in -----------------------------------------------------------------------------------------------------------
    def _put(self, item: Entry | Input) -> None:
        self._inbox.append(item)
        self._news.set()

    async def _read_work(self) -> None:
        """New requests, aborts and stops; while draining only the latter two."""
        await self.confirm_lease()
        for entry in await self._work.read(new_requests=not self.draining.is_set()):
            self._put(entry)
        await self._let_plan()

    async def _claim_work(self) -> None:
        async for entry in self._work.claim():
            self._put(entry)

    async def _read_results(self) -> None:
        """Results of all replicas. A replica that has joined is told to the core when its results are being read."""
        joining = self._membership.joining
        while joining:
            joined = joining.popleft()
            self._results.follow(joined.replica)
            self._put(joined)
        if not self._results.is_reading:
            await asyncio.sleep(LOOK_S / 2)
            return
        for entry in await self._results.read():
            self._put(entry)
        await self._let_plan()

    @staticmethod
    async def _let_plan() -> None:
        """Before more is read, what was read is taken in, and the plan that follows from it is sent."""
        for _ in range(TURNS_TO_PLAN):
            await asyncio.sleep(0)

    def _take(self, item: Entry | Input) -> None:
        if not isinstance(item, Entry):
            self._take_event(item)
        elif isinstance(item.message, TokenizedRequest | AbortRequest | CancelRequest | StopSequence | RequestsDone):
            try:
                self._take_work(item, item.message)
            except Exception as error:
                if self.core.knows(getattr(item.message, "request_id", "")):
                    raise  # it may be taken in by half: a successor starts without that
                self._poison.give_up(item, describe(error))
        elif isinstance(item.message, StepResult | ReplicaFenced):
            self._take_result(item, item.message)
        elif isinstance(item.message, StateRequested | BlockRequested):
            self._observers.ask(item.message)
            self._work.settled(item)
        else:
            self._poison.give_up(item, item.error or f"unexpected {type(item.message).__name__}")

    def _take_work(
        self, entry: Entry, message: TokenizedRequest | AbortRequest | CancelRequest | StopSequence | RequestsDone
    ) -> None:
        if not isinstance(message, TokenizedRequest):
            self.core.take(message)
            self._work.settled(entry)
            return
        self._membership.expect((message.ingress,))
        if (known := self._work.requests.get(message.request_id)) is not None:
            if known.id == entry.id:
                return  # handed out twice: Redis has forgotten the first time in a failover
            self.core.take(message)
            same = self.core.attempt_of(message.request_id) == message.attempt
            self._work.asked_again(message.request_id, entry, same=same)
        else:
            self._work.requests[message.request_id] = entry
            if entry.deliveries > 1:
                self._readmit(entry, message)
            else:
                self.core.take(message)

    def _readmit(self, entry: Entry, message: TokenizedRequest) -> None:
        """A request that was taken in before, by another scheduler, which may have failed at it."""
        message, outputs = self._recovered.take(message)
        self._membership.expect((message.ingress,))  # where its client had moved to, and may have died since
        if reason := self._poison.verdict(message.request_id):
            self._poison.give_up(replace(entry, message=message), reason)
        else:
            self.core.readmit(message, outputs)

    def _take_result(self, entry: Entry, message: StepResult | ReplicaFenced) -> None:
        name = self._results.replica_of(entry)
        member = self._membership.members.get(name)
        if member is None:
            return
        self._results.taken(entry)
        if entry.id.epoch < member.epoch:
            return  # of an executor that was replaced long ago
        if isinstance(message, ReplicaFenced) or entry.id.epoch > member.epoch:
            reason, error = "replaced", ""
            if isinstance(message, ReplicaFenced):
                reason, error = message.reason, message.error
                self._membership.refused[name] = member.epoch  # one that fails says so before it gives its lease back
            self._meters.lost(name, error)
            self._take_event(ReplicaLost(name, reason, self._membership.deaf_to(name)))
            return
        self._observers.landing(name, message)
        try:
            self.core.take(ReplicaResult(name, message))
        except ProtocolError as error:
            if member.fenced:
                return  # what follows a false result makes no sense either
            self.log.error("false result: the executor is shut out", replica=name, error=str(error))
            self._meters.refused_results.inc()
            self._membership.distrust(name, str(error))

    def _take_event(self, event: Input) -> None:
        match event:
            case ReplicaLost(name):
                self._membership.lost(name)
                self._results.leave(name)
                replica = self.core.replicas.get(name)
                if replica is not None:
                    self._meters.forget(replica)
                    self._trimmer.replica_lost(name, replica.step)
            case DetokenizerLost(name):
                self._trimmer.detokenizer_lost(self.names.sequences(name), self._detokenizers.lost(name))
            case DetokenizersLive(names):
                for name in names:
                    self._detokenizers.lead(name)
            case _:
                pass
        try:
            self.core.take(event)
        except ValueError as error:
            assert isinstance(event, ReplicaJoined)
            self.log.error("executor cannot be used", replica=event.replica, error=str(error))
            self._membership.refused[event.replica] = event.epoch
            self._membership.lost(event.replica)
            self._results.leave(event.replica)

    # -- out ----------------------------------------------------------------------------------------------------------
    def _send(self, output: Output) -> None:
        match output:
            case ToReplica(replica, plan):
                at = self._outbox.append(self.names.steps(replica), plan)
                assert at.index == plan.step, f"step {plan.step} of {replica} would be entry {at}"
                self._meters.planned(replica, plan)
            case ToDetokenizer(detokenizer, message):
                self._detokenizers.tell(detokenizer, message)
                if self.settings.enable_log_requests and isinstance(message, SequenceStarted):
                    sequence = {"sequence": message.sequence_id, "cached_tokens": message.num_cached_tokens}
                    self.log.info("started", request_id=message.request_id, **sequence)
            case ToIngress(ingress, failure):
                self._meters.failed.inc()
                self._outbox.publish(self.names.replies(ingress), failure)
            case ToJournal(message):
                self._checkpoints.append(message)
            case RequestOver(request_id, request):
                if request is not None:
                    self._meters.over(request)
                    if request.traced and not request.away:
                        self._outbox.publish(self.names.replies(request.ingress), times_of(request))
                self._poison.over(request_id)
                self._work.over(request_id)
            case Note("request given up", fields):
                self._poison.given_up(fields)
            case Note("preempted", fields):
                self._preempted[str(fields["request_id"])] += 1
            case Note(event, fields):
                self.log.info(event, **fields)

    def _fence(self, replica: str, epoch: int, reason: str) -> None:
        self.log.warning("replica is given up", replica=replica, epoch=epoch, reason=reason)
        fence = ReplicaFenced(replica=replica, reason=reason)
        self._outbox.append_at(self.names.results(replica), EntryId(epoch, FENCE_INDEX), fence)

    # -- beside the loop ----------------------------------------------------------------------------------------------
    def lease_lapsed(self) -> None:
        self._lookout.doubt()

    async def _look(self) -> None:
        """Who is there? While the bus is away for one task, what another one sees may be wrong; and who cannot renew
        its own lease, cannot expect it of others."""
        if self._patience.away or self.bus_is_away:
            self._lookout.doubt()
        await self._lookout.look(self.epoch)
        await asyncio.sleep(LOOK_S if self.core.replicas else EAGER_LOOK_S)

    async def _keep_house(self, pause_s: float = HOUSEKEEPING_S) -> None:
        """Metrics, log lines that would be too many, and trimming."""
        await asyncio.sleep(pause_s)
        await self.confirm_lease()
        await self._claim_work()
        self._meters.update(self.core)
        if self._preempted:
            times, self._preempted = self._preempted, Counter()
            shown = [request_id for request_id, _ in times.most_common(SHOWN_IDS)]
            self.log.info("preempted", count=times.total(), request_ids=shown)
        if self.core.delivery.is_waiting:
            self._news.set()
        await self._sum_up()
        await self._trimmer.trim(self.core, self._membership, self._checkpoints.covered)

    async def _sum_up(self) -> None:
        """Write a checkpoint, unless something that was left or read has not been taken in yet."""
        if not self._inbox:
            self._recovered = Recovered()
            await self._checkpoints.sum_up(
                self.core,
                self._results.positions,
                self._membership,
                self._poison.blamed.values(),
            )
