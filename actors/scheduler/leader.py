"""The main loop of the scheduler that leads, and the tasks beside it.

The tasks read requests, results and leases into one inbox. The loop sleeps until the inbox has items.
It then handles all of them (:mod:`pagebus.actors.scheduler.intake`), plans once, and hands the messages to the outbox
(:mod:`pagebus.actors.scheduler.outputs`). Nothing on that path waits for the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.bus_retry import BusRetry
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
from pagebus.actors.scheduler.service.membership import DRAINED, Membership
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.scheduler.service.observers import Observers
from pagebus.actors.scheduler.service.result_streams import ResultStreams
from pagebus.actors.scheduler.service.steering import Steering
from pagebus.actors.scheduler.service.trimming import Trimmer
from pagebus.actors.scheduler.service.work_stream import WorkStream
from pagebus.actors.telemetry.spans import Spans
from pagebus.actors.telemetry.steady_clock import steady_time_s
from pagebus.bus.contract import FENCE_INDEX, BusUnavailable, Entry, EntryId
from pagebus.bus.messages import ReplicaFenced
from pagebus.bus.outbox import Outbox

EAGER_LOOK_S = 0.05
"""The interval between looks at the leases while there is no executor."""
HOUSEKEEPING_S = 1.0
MAX_UNSENT = 4096
"""Planning pauses while more messages than this wait to be sent."""
STANDBY_STATE = "standby:scheduler"
"""Key on the bus that says which scheduler stands by, if one does."""
TURNS_TO_PLAN = 2
"""Turns of the event loop that a reader yields: one for the main loop, one for the outbox."""


class Leader:
    """What a scheduler does while it leads.

    Args:
        outbox, work: made for this lease.
        takeover, recovered: the predecessor's state, read to its end.
    """

    def __init__(
        self,
        actor: Actor,
        core: Core,
        outbox: Outbox,
        work: WorkStream,
        takeover: Takeover,
        recovered: Recovered,
        *,
        bus_retry: BusRetry,
        metrics: SchedulerMetrics,
        spans: Spans | None,
    ) -> None:
        bus, names, settings = actor.bus, actor.names, actor.settings
        self.log = actor.log
        self.work = work
        self.core = core
        self._actor = actor
        self._outbox = outbox
        self._bus_retry, self._metrics, self._spans = bus_retry, metrics, spans
        self._inbox: deque[Entry | Input] = deque()
        self._news = asyncio.Event()
        self._hands_over = False
        self.membership = Membership(self._put, self._fence)
        self.lease_watch = LeaseWatch(bus, self.membership, settings.lease_ttl_s)
        self._detokenizers = Detokenizers(names, outbox)
        self._observers = Observers(core, outbox, names)
        self._steering = Steering(core, outbox, names, actor.renew_soon)
        self._trimmer = Trimmer(bus, names, actor.epoch)
        self._remains = Remains(bus, names, outbox, self._forget)
        self._results = ResultStreams(bus, names, takeover.read)
        self._checkpoints = Checkpoints(bus, names, outbox, end=takeover.journal_end, covered=takeover.ledger.positions)
        self._dead_letters = DeadLetters(
            bus, names, outbox, work, takeover.ledger.blamed,
            bus_retry=self._bus_retry, metrics=self._metrics, log=self.log, spawn=actor.spawn,
        )  # fmt: skip
        self._intake = Intake(
            core=core, names=names, work=work, results=self._results, recovered=recovered,
            membership=self.membership, detokenizers=self._detokenizers, observers=self._observers,
            steering=self._steering, dead_letters=self._dead_letters, trimmer=self._trimmer, remains=self._remains,
            metrics=self._metrics, log=self.log,
        )  # fmt: skip
        self._outputs = OutputRouter(
            names, outbox, core=core, detokenizers=self._detokenizers, checkpoints=self._checkpoints, work=work,
            dead_letters=self._dead_letters, metrics=self._metrics, log=self.log,
            logs_requests=settings.enable_log_requests,
        )  # fmt: skip

    # -- life ---------------------------------------------------------------------------------------------------------
    async def start(self, takeover: Takeover) -> None:
        """Continue from the predecessor's state, and start the tasks beside the loop."""
        await self._bus_retry.until_taken(lambda: self._steering.recall(self._actor.bus), "hold")
        await self._bus_retry.until_taken(self._remains.recall, "names of streams")
        self._go_on_from(takeover)
        await self._bus_retry.until_taken(self._claim_work, "work left behind")
        for name, once in (
            ("work", self._read_work),
            ("results", self._read_results),
            ("acks", self.work.acknowledge_next),
            ("leases", self._look),
            ("housekeeping", self._keep_house),
        ):
            self._actor.spawn(self._bus_retry.for_ever(once, name), name)

    def _go_on_from(self, takeover: Takeover) -> None:
        for replica in takeover.marks:
            self.core.skip_steps(replica, MARK_STEP)
            self._trimmer.replica_lost(replica, MARK_STEP)  # answered, or no executor is left to answer
        for replica, end in takeover.read.items():
            self._remains.gone("executor", replica)  # unless it joins
            if end.index == FENCE_INDEX:  # an executor that has failed may still have its lease
                self.membership.refused[replica] = end.epoch
                self.lease_watch.shut_out("executor", replica, end.epoch)
        self.membership.expect(takeover.ledger.ingresses, takeover.ledger.detokenizers)
        self._detokenizers.expect(takeover.ledger.detokenizers)

    def wake(self) -> None:
        """Run the loop once more, as if an input had come."""
        self._news.set()

    async def serve(self) -> None:
        """Handle inputs, plan and send, until draining and at an end: no work is left, or no executor for it, as when a
        deployment stops with jobs under way, or a standby is there. A successor continues what is left, from the
        journal."""
        while not (self._actor.draining.is_set() and not self._inbox and await self._may_end()):
            await self._news.wait()
            self._news.clear()
            await self._actor.confirm_lease()
            if self._outbox.depth > MAX_UNSENT:
                await self._outbox.flush()
            taken_s = steady_time_s()
            while self._inbox:
                self._intake.handle(self._inbox.popleft())
            await self._plan(self._note_work("land", taken_s))

    async def _may_end(self) -> bool:
        if self.core.is_idle or not self.core.replicas:
            return True
        with contextlib.suppress(BusUnavailable):
            (told,) = await self._actor.bus.get_state(STANDBY_STATE)
            self._hands_over = told is not None and told.get("actor") != self._actor.name
        return self._hands_over

    async def drain(self) -> None:
        """Send the queued messages, acknowledge the entries handled, and trim. A standby takes over at any place, as
        from one that has died."""
        await self._outbox.flush()
        if self._hands_over:
            return
        while self.work.has_settled:
            await self._bus_retry.until_taken(self.work.acknowledge, "acks")
        await self._bus_retry.until_taken(lambda: self._keep_house(pause_s=0.0), "housekeeping")

    async def bequeath(self, error: BaseException) -> None:
        """Record in the journal the request that this scheduler failed on, if there is one."""
        if (blame := self._dead_letters.blame(error)) is not None:
            self._checkpoints.append(blame)
            await self._outbox.flush()

    async def _plan(self, now_s: float) -> None:
        """Plan, and queue messages in the outbox, which sends a replica's first plan while later ones are built."""
        looked_at, began_s = self._observers.is_looked_at(now_s), now_s
        for part in self.core.plan_in_turns(now_s):
            for output in part:
                self._outputs.route(output)
                if looked_at:
                    self._observers.decided(output, now_s)
            self._outbox.hurry()
            began_s = self._note_work("plan", began_s)
            if part:
                await self._outbox.turn()
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
        """Discard positions that the bus may have lost."""
        self.membership.bus_restarted()
        self._checkpoints.bus_restarted()
        self._trimmer.bus_restarted()
        self._remains.bus_restarted()

    # -- reading ------------------------------------------------------------------------------------------------------
    def _put(self, item: Entry | Input) -> None:
        self._inbox.append(item)
        self._news.set()

    async def _read_work(self) -> None:
        """Read new requests, aborts and stops; while draining, no new requests."""
        await self._actor.confirm_lease()
        for entry in await self.work.read(new_requests=not self._actor.draining.is_set()):
            self._put(entry)
        await self._let_plan()

    async def _claim_work(self) -> None:
        async for entry in self.work.claim():
            self._put(entry)

    async def _read_results(self) -> None:
        """Read results of all replicas. The core learns of a new replica once its results are being read."""
        joining = self.membership.joining
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
        if reason == DRAINED:
            self.log.info("replica has left", replica=replica, epoch=epoch)
        else:
            self.log.warning("replica is given up", replica=replica, epoch=epoch, reason=reason)
        fence = ReplicaFenced(replica=replica, reason=reason)
        self._outbox.append_at(self._actor.names.results(replica), EntryId(epoch, FENCE_INDEX), fence)

    async def _look(self) -> None:
        """Look at the leases once. Absences are not believed while the bus is away for any task, or while the scheduler
        cannot renew its own lease."""
        if self._bus_retry.away or self._actor.bus_is_away:
            self.lease_watch.doubt()
        await self.lease_watch.look(self._actor.epoch)
        await asyncio.sleep(LOOK_S if self.core.replicas else EAGER_LOOK_S)

    async def _keep_house(self, pause_s: float = HOUSEKEEPING_S) -> None:
        """Claim left-over work, write summary log lines, checkpoint and trim."""
        await asyncio.sleep(pause_s)
        await self._actor.confirm_lease()
        await self._claim_work()
        self._outputs.log_preempted()
        if self.core.waits_for_time:
            self._news.set()
        await self._sum_up()
        positions = self._results.positions
        covered = {replica: at for replica, at in self._checkpoints.covered.items() if replica in positions}
        await self._trimmer.trim(self.core, self.membership, covered)
        await self._remains.clear()

    def _forget(self, kind: str, name: str) -> None:
        """Drop state about an actor whose streams are deleted."""
        if kind == "executor":
            self._results.forget(name)
            self._trimmer.forget(name)
            self._metrics.drop(name)

    async def _sum_up(self) -> None:
        """Write a checkpoint, unless inputs are still unhandled."""
        if not self._inbox:
            self._intake.forget_recovered()
            await self._checkpoints.sum_up(
                self.core,
                self._results.positions,
                self.membership,
                self._dead_letters.blamed.values(),
            )
