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
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from actors.actor import RETRY_S, Actor, describe
from actors.model_config import ModelConfig, resolve_model
from actors.scheduler.blame import MOST_BLAMES, blamed
from actors.scheduler.config import CoreConfig
from actors.scheduler.core import Core
from actors.scheduler.events import (
    DetokenizerLost,
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
from actors.scheduler.journal import Ledger, checkpoint
from actors.scheduler.membership import Membership
from actors.scheduler.meters import Meters
from actors.scheduler.output import Output as SequenceOutput
from actors.scheduler.portrait import Portrait
from actors.scheduler.takeover import MARK_STEP, Takeover
from actors.scheduler.telling import times_of
from actors.scheduler.trimming import Trimmer
from actors.settings import Settings
from actors.spans import spans_of
from actors.steady_clock import steady_time_s
from bus.contract import FENCE_INDEX, START, Bus, BusError, BusUnavailable, Entry, EntryId
from bus.messages import (
    AbortRequest,
    BlockRequested,
    CancelRequest,
    ReplicaFenced,
    RequestBlamed,
    RequestFailed,
    RequestsDone,
    SchedulerLeads,
    SequenceStarted,
    StateRequested,
    StepResult,
    StopSequence,
    TokenizedRequest,
)
from bus.outbox import Outbox
from bus.streams import SCHEDULER_GROUP

LEASE = "leader"
STAGE = "scheduler"
WORK_BLOCK_MS = 1000
RESULTS_BLOCK_MS = 200
"""Longest wait of one read of results: a replica that joins is read, and planned for, after this time."""
READ_COUNT = 512
LOOK_S = 0.25
EAGER_LOOK_S = 0.05
"""While there is no executor."""
HOUSEKEEPING_S = 1.0
SENT_LATE_S = 30.0
"""How long something may still be sent to an ingress that is gone."""
MAX_UNSENT = 4096
"""Nothing is planned while more messages than this wait for the bus."""
SHOWN_IDS = 8


class SchedulerActor(Actor):
    """The one scheduler of a deployment; a second one stands by. ``core`` decides."""

    kind: ClassVar[str] = "scheduler"

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self.core = Core(CoreConfig(block_size=settings.block_size))
        self._portrait = Portrait(self.core)
        self._asked: list[StateRequested | BlockRequested] = []
        self._meters = Meters(self.metrics)
        self._membership = Membership(self._put, self._fence)
        self._inbox: deque[Entry | Input] = deque()
        self._news = asyncio.Event()
        self._acks: deque[tuple[int, Entry]] = deque()
        self._to_ack = asyncio.Event()
        self._entries: dict[str, Entry] = {}
        """The work entries of all requests that are not over."""
        self._left = Ledger()
        self._recovered: dict[str, dict[int, SequenceOutput]] = {}
        self._blamed: dict[str, RequestBlamed] = {}
        """Requests that are not over, and that schedulers have failed at."""
        self._journal_end = START
        self._led: set[str] = set()
        self._summed_up: dict[str, EntryId] = {}
        """Positions in the results that no successor needs to read from."""
        self._reading: dict[str, EntryId] = {}
        self._positions: dict[str, EntryId] = {}
        self._replica_of: dict[str, str] = {}
        self._told: dict[str, EntryId] = {}
        self._preempted: Counter[str] = Counter()
        self._away: set[str] = set()
        self._believe_absence_s = 0.0
        self._looked_s = time.monotonic()
        self._gone: dict[str, float] = {}
        """Addresses of dead ingresses, and until when (monotonic) something may still be sent there."""
        self._spans = spans_of(settings, name)

    def lease_name(self) -> str:
        return LEASE

    def request_drain(self) -> None:
        super().request_drain()
        self._news.set()

    # -- life ---------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Learn the model's end tokens, and start the tasks beside the loop."""
        settings = self.settings
        path = await asyncio.to_thread(resolve_model, settings, weights=False)
        model = await asyncio.to_thread(ModelConfig.load, path)
        self.core = Core(
            CoreConfig(
                block_size=settings.block_size,
                pipeline_depth=settings.pipeline_depth,
                max_num_queued_requests=settings.max_num_queued_requests,
                enable_prefix_caching=settings.enable_prefix_caching,
                preemption_mode=settings.preemption_mode,
                priorities=settings.scheduling_policy == "priority",
                priority_aging_s=settings.priority_aging_s,
                itl_target_s=_seconds(settings.itl_target_ms),
                ttft_target_s=_seconds(settings.ttft_target_ms),
                epoch=self.epoch,
                eos_token_ids=model.eos_token_ids,
                resume_timeout_s=settings.resume_timeout_s,
                vocab_size=model.vocab_size,
            )
        )
        self._portrait = Portrait(self.core)
        self._outbox = Outbox(self.bus, self.epoch)
        self._trimmer = Trimmer(self.bus, self.names, self.epoch)
        for stream in (self.names.tokenized, self.names.control):
            await self._retrying("groups", partial(self.bus.create_group, stream, SCHEDULER_GROUP))
        self.spawn(self._outbox.run(), "outbox")
        await self._take_over()
        await self._retrying("work left behind", self._claim_work)
        for name, once in (
            ("work", self._read_work),
            ("results", self._read_results),
            ("acks", self._ack),
            ("leases", self._look),
            ("housekeeping", self._keep_house),
        ):
            self.spawn(self._for_ever(name, once), name)

    async def _take_over(self) -> None:
        """Learn what the scheduler before this one left, down to the last token."""
        began_s = time.monotonic()
        takeover = Takeover(self.bus, self.names, self._outbox)
        await self._retrying("takeover", takeover.run)
        self._left = takeover.ledger
        self._recovered = takeover.ledger.outputs()
        self._blamed = takeover.ledger.blamed
        self._journal_end = takeover.journal_end
        self._positions.update(takeover.read)
        self._summed_up.update(self._left.positions)
        for replica in takeover.marks:
            self.core.skip_steps(replica, MARK_STEP)
        self._membership.expect(self._left.ingresses, self._left.detokenizers)
        for detokenizer in self._left.detokenizers:
            self._told[self.names.sequences(detokenizer)] = EntryId(self.epoch - 1, FENCE_INDEX)
        await self._retrying("detokenizers", self._lead_all)
        if self._recovered:
            seconds = round(time.monotonic() - began_s, 3)
            self.log.info("took over", requests=len(self._recovered), replicas=sorted(takeover.read), seconds=seconds)

    async def _claim_work(self) -> None:
        """What another scheduler has left, or has been handed since: one that was frozen may read once more before it
        learns that it has been replaced."""
        for stream in (self.names.tokenized, self.names.control):
            consumers = await self.bus.consumers(stream, SCHEDULER_GROUP)
            for other in consumers.keys() - {self._consumer}:
                for entry in await self.bus.claim(stream, SCHEDULER_GROUP, self._consumer, other):
                    self._put(entry)

    @property
    def _consumer(self) -> str:
        """Under which name it reads work: no two schedulers have the same one."""
        return f"{self.name}@{self.epoch}"

    async def _lead_all(self) -> None:
        """Detokenizers that are there hear of the new scheduler also if there is nothing else to tell them."""
        for lease in await self.bus.leases("detokenizer"):
            self._lead(self.names.sequences(lease.name))

    def _lead(self, stream: str) -> None:
        """Tell a detokenizer that nothing of an earlier scheduler is valid any more, before it hears anything else."""
        if stream not in self._led:
            self._led.add(stream)
            self._told[stream] = self._outbox.append(stream, SchedulerLeads(epoch=self.epoch))

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
            planned_s = steady_time_s()
            watched = self._portrait.is_watched(planned_s)
            for output in self.core.plan(planned_s):
                self._send(output)
                if watched:
                    self._show(output, planned_s)
            if self._asked:
                self._answer_observers(planned_s)
            self._note_work(taken_s, planned_s, steady_time_s())

    async def drain(self) -> None:
        """Send what is queued, ack what was taken in, trim."""
        await self._outbox.flush()
        while self._acks:
            await self._ack()
        await self._keep_house(pause_s=0.0)

    async def bequeath(self, error: BaseException) -> None:
        """Tell the next scheduler which request this one has failed at, if it was one."""
        request = None if isinstance(error, BusError) else blamed(error)
        if request is None:
            return
        times = self._blamed[request.id].times + 1 if request.id in self._blamed else 1
        self.log.error("request blamed", request_id=request.id, times=times)
        blame = RequestBlamed(request_id=request.id, reason=describe(error), times=times)
        self._outbox.append(self.names.journal, blame)
        await self._outbox.flush()

    async def stop(self) -> None:
        """Store the spans, if they were asked for."""
        if self._spans is not None:
            self._spans.write()

    def _note_work(self, taken_s: float, planned_s: float, sent_s: float) -> None:
        """One turn of the loop: took in, planned and handed to the outbox."""
        self._meters.busy.inc(sent_s - taken_s)
        if self._spans is not None:
            self._spans.add("land", 0, taken_s, planned_s)
            self._spans.add("plan", 0, planned_s, sent_s)

    # -- in -----------------------------------------------------------------------------------------------------------
    def _put(self, item: Entry | Input) -> None:
        self._inbox.append(item)
        self._news.set()

    async def _read_work(self) -> None:
        """New requests, aborts and stops; while draining only the latter two."""
        await self.confirm_lease()
        streams = [self.names.control] if self.draining.is_set() else [self.names.tokenized, self.names.control]
        for entry in await self.bus.read_group(
            SCHEDULER_GROUP, self._consumer, streams, count=READ_COUNT, block_ms=WORK_BLOCK_MS
        ):
            self._put(entry)

    async def _read_results(self) -> None:
        """Results of all replicas. A replica that has joined is told to the core when its results are being read."""
        joining = self._membership.joining
        while joining:
            joined = joining.popleft()
            self._reading[joined.replica] = self._positions.setdefault(joined.replica, START)
            self._replica_of[self.names.results(joined.replica)] = joined.replica
            self._put(joined)
        if not self._reading:
            await asyncio.sleep(LOOK_S / 2)
            return
        positions = {self.names.results(replica): at for replica, at in self._reading.items()}
        for entry in await self.bus.read(positions, count=READ_COUNT, block_ms=RESULTS_BLOCK_MS):
            replica = self._replica_of[entry.stream]
            if replica in self._reading:
                self._reading[replica] = entry.id
                self._put(entry)

    def _take(self, item: Entry | Input) -> None:
        if not isinstance(item, Entry):
            self._take_event(item)
        elif isinstance(item.message, TokenizedRequest | AbortRequest | CancelRequest | StopSequence | RequestsDone):
            try:
                self._take_work(item, item.message)
            except Exception as error:
                if self.core.knows(getattr(item.message, "request_id", "")):
                    raise  # it may be taken in by half: a successor starts without that
                self._give_up(item, describe(error))
        elif isinstance(item.message, StepResult | ReplicaFenced):
            self._take_result(item, item.message)
        elif isinstance(item.message, StateRequested | BlockRequested):
            self._asked.append(item.message)
            self._settled(item)
        else:
            self._give_up(item, item.error or f"unexpected {type(item.message).__name__}")

    def _take_work(
        self, entry: Entry, message: TokenizedRequest | AbortRequest | CancelRequest | StopSequence | RequestsDone
    ) -> None:
        if not isinstance(message, TokenizedRequest):
            self.core.take(message)
            self._settled(entry)
        elif (known := self._entries.get(message.request_id)) is not None:
            if known.id == entry.id:
                return  # handed out twice: Redis has forgotten the first time in a failover
            self.core.take(message)  # asked for again: the first entry stands for the request
            self._settled(entry)
        else:
            self._entries[message.request_id] = entry
            self._membership.expect((message.ingress,))
            if entry.deliveries > 1:
                self._readmit(entry, message)
            else:
                self.core.take(message)

    def _readmit(self, entry: Entry, message: TokenizedRequest) -> None:
        """A request that was taken in before, by another scheduler, which may have failed at it."""
        moved = self._left.moved.pop(message.request_id, None)
        if moved is not None:
            message = replace(message, ingress=moved.ingress, attempt=moved.attempt)
        blame = self._blamed.get(message.request_id)
        if blame is not None and blame.times >= MOST_BLAMES:
            self._give_up(replace(entry, message=message), blame.reason)
        else:
            self.core.readmit(message, self._recovered.pop(message.request_id, {}))

    def _take_result(self, entry: Entry, message: StepResult | ReplicaFenced) -> None:
        name = self._replica_of.get(entry.stream, "")
        member = self._membership.members.get(name)
        if member is None:
            return
        self._positions[name] = entry.id
        if entry.id.epoch < member.epoch:
            return  # of an executor that was replaced long ago
        if isinstance(message, ReplicaFenced) or entry.id.epoch > member.epoch:
            reason = message.reason if isinstance(message, ReplicaFenced) else "replaced"
            self._take_event(ReplicaLost(name, reason, self._membership.deaf_to(name)))
            return
        now_s = steady_time_s()
        if self._portrait.is_watched(now_s):
            self._portrait.landing(name, message, now_s)
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
                self._reading.pop(name, None)
                replica = self.core.replicas.get(name)
                if replica is not None:
                    self._meters.forget(replica)
                    self._trimmer.replica_lost(name, replica.step)
            case DetokenizerLost(name) if (stream := self.names.sequences(name)) in self._told:
                self._trimmer.detokenizer_lost(stream, self._told.pop(stream))
                self._led.discard(stream)
            case _:
                pass
        try:
            self.core.take(event)
        except ValueError as error:
            assert isinstance(event, ReplicaJoined)
            self.log.error("executor cannot be used", replica=event.replica, error=str(error))
            self._membership.refused[event.replica] = event.epoch
            self._membership.lost(event.replica)
            self._reading.pop(event.replica, None)

    def _settled(self, entry: Entry) -> None:
        """The entry has had its effect, once everything that is queued by now is stored."""
        self._acks.append((self._outbox.queued, entry))
        self._to_ack.set()

    def _give_up(self, entry: Entry, reason: str) -> None:
        """Nobody can process this entry: keep it aside, tell its client if we know it, go on."""
        message = entry.message
        request_id = getattr(message, "request_id", None)
        self.log.error("dead letter", stream=entry.stream, id=str(entry.id), request_id=request_id, reason=reason)
        self._meters.dead.inc()
        if isinstance(message, TokenizedRequest):
            self._entries.pop(message.request_id, None)
            self._blamed.pop(message.request_id, None)
            text = "The server failed to schedule this request."
            failed = RequestFailed(request_id=message.request_id, status=500, error_type="internal_error", message=text)
            self._outbox.publish(self.names.replies(message.ingress), failed)
        self.spawn(self._bury(entry, reason), "dead letter")

    async def _bury(self, entry: Entry, reason: str) -> None:
        await self._retrying("dead letters", lambda: self.bus.dead_letter(STAGE, entry, reason))
        if entry.stream in (self.names.tokenized, self.names.control):
            self._settled(entry)

    # -- out ----------------------------------------------------------------------------------------------------------
    def _send(self, output: Output) -> None:
        match output:
            case ToReplica(replica, plan):
                at = self._outbox.append(self.names.steps(replica), plan)
                assert at.index == plan.step, f"step {plan.step} of {replica} would be entry {at}"
                self._meters.planned(replica, plan)
            case ToDetokenizer(detokenizer, message):
                stream = self.names.sequences(detokenizer)
                self._lead(stream)
                self._told[stream] = self._outbox.append(stream, message)
                if self.settings.enable_log_requests and isinstance(message, SequenceStarted):
                    sequence = {"sequence": message.sequence_id, "cached_tokens": message.num_cached_tokens}
                    self.log.info("started", request_id=message.request_id, **sequence)
            case ToIngress(ingress, failure):
                self._meters.failed.inc()
                self._outbox.publish(self.names.replies(ingress), failure)
            case ToJournal(message):
                self._journal_end = self._outbox.append(self.names.journal, message)
            case RequestOver(request_id, request):
                if request is not None:
                    self._meters.over(request)
                    if request.traced and not request.away:
                        self._outbox.publish(self.names.replies(request.ingress), times_of(request))
                self._blamed.pop(request_id, None)
                if (entry := self._entries.pop(request_id, None)) is not None:
                    self._settled(entry)
            case Note("request given up", fields):
                entry = self._entries[str(fields["request_id"])]
                self.log.error("dead letter", id=str(entry.id), **fields)
                self._meters.dead.inc()
                self.spawn(self._bury(entry, str(fields["reason"])), "dead letter")
            case Note("preempted", fields):
                self._preempted[str(fields["request_id"])] += 1
            case Note(event, fields):
                self.log.info(event, **fields)

    def _show(self, output: Output, now_s: float) -> None:
        """Somebody looks: keep what they will want to know."""
        match output:
            case ToReplica(replica, plan):
                self._portrait.planned(replica, plan)
            case RequestOver(_, request) if request is not None:
                self._portrait.over(request, now_s)

    def _answer_observers(self, now_s: float) -> None:
        """Tell what was asked for, as it is once everything before has been taken in and planned."""
        asked, self._asked = self._asked, []
        for message in asked:
            told = (
                self._portrait.block(message)
                if isinstance(message, BlockRequested)
                else self._portrait.draw(message, now_s)
            )
            self._outbox.publish(self.names.replies(message.ingress), told)

    def _fence(self, replica: str, epoch: int, reason: str) -> None:
        self.log.warning("replica is given up", replica=replica, epoch=epoch, reason=reason)
        fence = ReplicaFenced(replica=replica, reason=reason)
        self._outbox.append_at(self.names.results(replica), EntryId(epoch, FENCE_INDEX), fence)

    async def _ack(self) -> None:
        await self._to_ack.wait()
        batch = list(self._acks)
        await self._outbox.stored(batch[-1][0])
        await self.confirm_lease()
        await self.bus.ack(SCHEDULER_GROUP, [entry for _, entry in batch])
        acked = set(map(id, batch))
        while self._acks and id(self._acks[0]) in acked:  # unless the drain, beside this task, was faster
            self._acks.popleft()
        if not self._acks:
            self._to_ack.clear()

    # -- beside the loop ----------------------------------------------------------------------------------------------
    def lease_lapsed(self) -> None:
        self._believe_absence_s = time.monotonic() + self.settings.lease_ttl_s

    async def _look(self) -> None:
        """Who is there? After an outage of the bus, or of this process, or a jump of the clock of Redis, which has all
        leases expire, actors get the time of a lease to show that they live."""
        leases = await self.bus.leases()
        now_s = time.monotonic()
        if not any(lease.epoch == self.epoch for lease in leases):
            self.lease_lapsed()
        if self._away or now_s - self._looked_s > LOOK_S + self.settings.lease_ttl_s / 3:
            self._believe_absence_s = now_s + self.settings.lease_ttl_s
        self._looked_s = now_s
        revoked = set()
        if now_s >= self._believe_absence_s:
            for kind, name in self._membership.absent(leases):
                if await self.bus.revoke_lease(kind, name):
                    revoked.add((kind, name))
        self._membership.look(leases, revoked)
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
        await self._trimmer.trim(self.core, self._membership, self._summed_up)
        await self._forget_ingresses()

    async def _forget_ingresses(self) -> None:
        """Delete the mailboxes of dead ingresses, several times: who has not heard of the death still sends there."""
        gone = self._membership.gone_ingresses
        now_s = time.monotonic()
        while gone:
            self._gone[gone.pop()] = now_s + SENT_LATE_S
        if self._gone:
            await self.bus.delete(*map(self.names.replies, self._gone))
            self._gone = {address: until_s for address, until_s in self._gone.items() if now_s < until_s}

    async def _sum_up(self) -> None:
        """Write a checkpoint if there are results that no checkpoint covers, and drop what it makes superfluous."""
        if self._inbox:
            return
        self._recovered.clear()
        self._left = Ledger()
        positions, forgettable = dict(self._positions), self.core.is_forgettable
        if positions == self._summed_up and not (forgettable and self._journal_end > START):
            return
        if forgettable:
            superfluous = self._journal_end
        else:
            epochs = {name: member.epoch for name, member in self._membership.members.items()}
            told = self._membership.ingresses, self._membership.live_detokenizers
            blames = self._blamed.values()
            summary = checkpoint(self.core, positions, epochs, ingresses=told[0], detokenizers=told[1], blamed=blames)
            self._journal_end = self._outbox.append(self.names.journal, summary)
            superfluous = EntryId(self._journal_end.epoch, self._journal_end.index - 1)
        await self._outbox.stored(self._outbox.queued)
        await self.bus.trim(self.names.journal, superfluous)
        if superfluous == self._journal_end:
            self._journal_end = START
        self._summed_up = positions

    async def _for_ever(self, task: str, once: Callable[[], Awaitable[Any]]) -> None:
        while True:
            await self._retrying(task, once)

    async def _retrying(self, task: str, call: Callable[[], Awaitable[Any]]) -> None:
        """Until the bus takes it; says once that the bus is away."""
        while True:
            try:
                await call()
                self._away.discard(task)
                return
            except BusUnavailable as error:
                if not self._away:
                    self.log.warning("bus unavailable", error=describe(error))
                self._away.add(task)
                self._believe_absence_s = time.monotonic() + self.settings.lease_ttl_s
                await asyncio.sleep(RETRY_S)


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000
