"""The scheduler actor: reads the bus, lets the core decide, and writes the bus.

Tasks beside the main loop read requests, results and leases into one inbox. The loop sleeps until the inbox has items.
It then handles all of them (:mod:`pagebus.actors.scheduler.intake`), plans once, and hands the messages to the outbox
(:mod:`pagebus.actors.scheduler.outputs`). Nothing on that path waits for the bus.

A request stays in its work stream until it is over. Everything else that a successor needs is in the journal. Results
are trimmed only after a checkpoint in the journal has summed them up
(:mod:`pagebus.actors.scheduler.recovery.journal`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import ClassVar

from pagebus.actors.model.config import ModelConfig, resolve_model
from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import Input
from pagebus.actors.scheduler.intake import Intake
from pagebus.actors.scheduler.outputs import OutputRouter
from pagebus.actors.scheduler.recovery.checkpoints import Checkpoints
from pagebus.actors.scheduler.recovery.remains import Remains
from pagebus.actors.scheduler.recovery.takeover import MARK_STEP, Recovered, Takeover
from pagebus.actors.scheduler.service.dead_letters import DeadLetters
from pagebus.actors.scheduler.service.detokenizers import Detokenizers
from pagebus.actors.scheduler.service.lease_watch import LOOK_S, LeaseWatch
from pagebus.actors.scheduler.service.membership import Membership
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.scheduler.service.observers import Observers
from pagebus.actors.scheduler.service.result_streams import ResultStreams
from pagebus.actors.scheduler.service.steering import Steering
from pagebus.actors.scheduler.service.trimming import Trimmer
from pagebus.actors.scheduler.service.work_stream import WorkStream
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.spans import spans_of
from pagebus.actors.telemetry.steady_clock import steady_time_s
from pagebus.bus.contract import FENCE_INDEX, Bus, Entry, EntryId
from pagebus.bus.messages import ReplicaFenced
from pagebus.bus.outbox import Outbox

LEASE = "leader"
EAGER_LOOK_S = 0.05
"""The interval between looks at the leases while there is no executor."""
HOUSEKEEPING_S = 1.0
MAX_UNSENT = 4096
"""Planning pauses while more messages than this wait to be sent."""
TURNS_TO_PLAN = 2
"""Turns of the event loop that a reader yields: one for the main loop, one for the outbox."""


class SchedulerActor(Actor):
    """The scheduler of a deployment. One leads and others stand by. ``core`` makes the decisions."""

    kind: ClassVar[str] = "scheduler"

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self.core = Core(CoreConfig(block_size=settings.block_size))
        self._inbox: deque[Entry | Input] = deque()
        self._news = asyncio.Event()
        self._membership = Membership(self._put, self._fence)
        self._lease_watch = LeaseWatch(bus, self._membership, settings.lease_ttl_s)
        self._bus_retry = BusRetry(self.log, on_away=self._lease_watch.doubt)
        self._metrics = SchedulerMetrics(self.metrics, self.publish_soon)
        self._spans = spans_of(settings, name)

    def lease_name(self) -> str:
        return LEASE

    def request_drain(self) -> None:
        super().request_drain()
        self._news.set()

    # -- life ---------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Read the model's end tokens, take over from a predecessor, and start the tasks beside the loop."""
        path = await asyncio.to_thread(resolve_model, self.settings, weights=False)
        model = await asyncio.to_thread(ModelConfig.load, path)
        self.core = Core(CoreConfig.of(self.settings, model, self.epoch))
        self._outbox = Outbox(self.bus, self.epoch)
        self._detokenizers = Detokenizers(self.names, self._outbox)
        self._observers = Observers(self.core, self._outbox, self.names)
        self._steering = Steering(self.core, self._outbox, self.names)
        self._trimmer = Trimmer(self.bus, self.names, self.epoch)
        self._remains = Remains(self.bus, self.names, self._outbox, self._forget)
        self._work = WorkStream(self.bus, self.names, f"{self.name}@{self.epoch}", self._outbox, self.confirm_lease)
        await self._bus_retry.until_taken(self._work.create_groups, "groups")
        self._dead_letters = DeadLetters(
            self.bus, self.names, self._outbox, self._work,
            bus_retry=self._bus_retry, metrics=self._metrics, log=self.log, spawn=self.spawn,
        )  # fmt: skip
        self.spawn(self._outbox.run(), "outbox")
        await self._take_over()
        await self._bus_retry.until_taken(self._claim_work, "work left behind")
        for name, once in (
            ("work", self._read_work),
            ("results", self._read_results),
            ("acks", self._work.acknowledge_next),
            ("leases", self._look),
            ("housekeeping", self._keep_house),
        ):
            self.spawn(self._bus_retry.for_ever(once, name), name)

    async def _take_over(self) -> None:
        """Recover the predecessor's state, down to the last token."""
        began_s = time.monotonic()
        await self._bus_retry.until_taken(lambda: self._steering.recall(self.bus), "hold")
        takeover = Takeover(self.bus, self.names, self._outbox)
        await self._bus_retry.until_taken(takeover.run, "takeover")
        await self._bus_retry.until_taken(self._remains.recall, "names of streams")
        ledger = takeover.ledger
        recovered = Recovered(ledger)
        self._dead_letters.blamed = ledger.blamed
        self._results = ResultStreams(self.bus, self.names, takeover.read)
        self._checkpoints = Checkpoints(
            self.bus, self.names, self._outbox, end=takeover.journal_end, covered=ledger.positions
        )
        for replica in takeover.marks:
            self.core.skip_steps(replica, MARK_STEP)
            self._trimmer.replica_lost(replica, MARK_STEP)  # answered, or no executor is left to answer
        for replica, end in takeover.read.items():
            self._remains.gone("executor", replica)  # unless it joins
            if end.index == FENCE_INDEX:  # an executor that has failed may still have its lease
                self._membership.refused[replica] = end.epoch
                self._lease_watch.shut_out("executor", replica, end.epoch)
        self._membership.expect(ledger.ingresses, ledger.detokenizers)
        self._detokenizers.expect(ledger.detokenizers)
        self._intake = Intake(
            core=self.core, names=self.names, work=self._work, results=self._results, recovered=recovered,
            membership=self._membership, detokenizers=self._detokenizers, observers=self._observers,
            steering=self._steering, dead_letters=self._dead_letters, trimmer=self._trimmer, remains=self._remains,
            metrics=self._metrics, log=self.log,
        )  # fmt: skip
        self._outputs = OutputRouter(
            self.names, self._outbox, detokenizers=self._detokenizers, checkpoints=self._checkpoints, work=self._work,
            dead_letters=self._dead_letters, metrics=self._metrics, log=self.log,
            logs_requests=self.settings.enable_log_requests,
        )  # fmt: skip
        if recovered:
            seconds = round(time.monotonic() - began_s, 3)
            self.log.info("took over", requests=len(recovered), replicas=sorted(takeover.read), seconds=seconds)

    async def serve(self) -> None:
        """Handle inputs, plan and send, until draining and idle."""
        while not (self.draining.is_set() and self.core.is_idle and not self._inbox):
            await self._news.wait()
            self._news.clear()
            await self.confirm_lease()
            if self._outbox.depth > MAX_UNSENT:
                await self._outbox.flush()
            taken_s = steady_time_s()
            while self._inbox:
                self._intake.handle(self._inbox.popleft())
            await self._plan(self._note_work("land", taken_s))

    async def drain(self) -> None:
        """Send the queued messages, acknowledge the entries handled, and trim."""
        await self._outbox.flush()
        while self._work.has_settled:
            await self._bus_retry.until_taken(self._work.acknowledge, "acks")
        await self._bus_retry.until_taken(lambda: self._keep_house(pause_s=0.0), "housekeeping")

    async def bequeath(self, error: BaseException) -> None:
        """Record in the journal the request that this scheduler failed on, if there is one."""
        if hasattr(self, "_dead_letters") and (blame := self._dead_letters.blame(error)) is not None:
            self._checkpoints.append(blame)
            await self._outbox.flush()

    async def stop(self) -> None:
        """Write the spans, if requested."""
        if self._spans is not None:
            self._spans.write()

    async def _plan(self, now_s: float) -> None:
        """Plan, and queue messages in the outbox, which sends a replica's first plan while later ones are built."""
        looked_at, began_s = self._observers.is_looked_at(now_s), now_s
        for part in self.core.plan_in_turns(now_s):
            for output in part:
                self._outputs.route(output)
                if looked_at:
                    self._observers.decided(output, now_s)
            began_s = self._note_work("plan", began_s)
            if part:
                await asyncio.sleep(0)
                began_s = steady_time_s()
        self._observers.answer(now_s)
        self._steering.answer()

    def _note_work(self, what: str, began_s: float) -> float:
        """Record the time of one part of the loop; returns the present time."""
        ended_s = steady_time_s()
        self._metrics.busy.inc(ended_s - began_s)
        if self._spans is not None:
            self._spans.add(what, 0, began_s, ended_s)
        return ended_s

    def bus_restarted(self) -> None:
        """Discard positions that the bus may have lost; a scheduler that plans on lost state would wait forever."""
        if hasattr(self, "_outbox"):
            self._outbox.bus_restarted()
            self._membership.bus_restarted()
        if hasattr(self, "_checkpoints"):
            self._checkpoints.bus_restarted()
            self._trimmer.bus_restarted()
            self._remains.bus_restarted()

    # -- reading ------------------------------------------------------------------------------------------------------
    def _put(self, item: Entry | Input) -> None:
        self._inbox.append(item)
        self._news.set()

    async def _read_work(self) -> None:
        """Read new requests, aborts and stops; while draining, no new requests."""
        await self.confirm_lease()
        for entry in await self._work.read(new_requests=not self.draining.is_set()):
            self._put(entry)
        await self._let_plan()

    async def _claim_work(self) -> None:
        async for entry in self._work.claim():
            self._put(entry)

    async def _read_results(self) -> None:
        """Read results of all replicas. The core learns of a new replica once its results are being read."""
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
        """Let the loop handle what was read, and send the resulting plan, before the next read."""
        for _ in range(TURNS_TO_PLAN):
            await asyncio.sleep(0)

    # -- beside the loop ----------------------------------------------------------------------------------------------
    def _fence(self, replica: str, epoch: int, reason: str) -> None:
        self.log.warning("replica is given up", replica=replica, epoch=epoch, reason=reason)
        fence = ReplicaFenced(replica=replica, reason=reason)
        self._outbox.append_at(self.names.results(replica), EntryId(epoch, FENCE_INDEX), fence)

    def lease_lapsed(self) -> None:
        self._lease_watch.doubt()

    async def _look(self) -> None:
        """Look at the leases once. Absences are not believed while the bus is away for any task, or while the scheduler
        cannot renew its own lease."""
        if self._bus_retry.away or self.bus_is_away:
            self._lease_watch.doubt()
        await self._lease_watch.look(self.epoch)
        await asyncio.sleep(LOOK_S if self.core.replicas else EAGER_LOOK_S)

    async def _keep_house(self, pause_s: float = HOUSEKEEPING_S) -> None:
        """Claim left-over work, write summary log lines, checkpoint and trim."""
        await asyncio.sleep(pause_s)
        await self.confirm_lease()
        await self._claim_work()
        self._outputs.log_preempted()
        if self.core.delivery.is_waiting:
            self._news.set()
        await self._sum_up()
        positions = self._results.positions
        covered = {replica: at for replica, at in self._checkpoints.covered.items() if replica in positions}
        await self._trimmer.trim(self.core, self._membership, covered)
        await self._remains.clear()

    def _forget(self, kind: str, name: str) -> None:
        """Drop state about an actor whose streams are deleted."""
        if kind == "executor":
            self._results.forget(name)
            self._trimmer.forget(name)

    async def measure(self) -> None:
        self._metrics.update(self.core)

    async def _sum_up(self) -> None:
        """Write a checkpoint, unless inputs are still unhandled."""
        if not self._inbox:
            self._intake.recovered = Recovered()
            await self._checkpoints.sum_up(
                self.core,
                self._results.positions,
                self._membership,
                self._dead_letters.blamed.values(),
            )
