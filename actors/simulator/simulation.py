"""The core, its replicas and the time between them, as a heap of events on a virtual clock.

The scheduler is one server: it takes in everything that has come, plans, and is busy for as long as the profile says;
what comes meanwhile waits. A plan reaches its executor after ``bus_s``; plans of one executor run one after another,
and a result is back ``bus_s`` after its step is done. As executing a plan depends on the plans before it only, it is
computed as soon as the plan is made; an executor that is killed simply never says the results that lie behind its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Protocol

from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import (
    MOVED,
    DetokenizersLive,
    Input,
    Note,
    Preempted,
    ReplicaJoined,
    ReplicaLost,
    ReplicaResult,
    ReplicaSuspended,
    RequestOver,
    ToDetokenizer,
    ToIngress,
    ToReplica,
)
from pagebus.actors.simulator.links import NEVER_S, Links, LinkSpeed, Transfer
from pagebus.bus.messages import (
    PullReport,
    RequestFailed,
    SequenceEnded,
    SequenceStarted,
    StepPlan,
    StepResult,
    TokenizedRequest,
)

LOOK_S = 0.25
"""How often the scheduler plans while somebody waits for a pull, though nothing else happens."""
QUERIES, HITS = "counts.prefix_queries", "counts.prefix_hits"
SWAPS, RECOMPUTES, DEPARTURES = "counts.num_swaps", "counts.num_recomputes", "counts.num_departures"
DRAFTED, ACCEPTED = "step_results.acceptance.num_draft_tokens", "step_results.acceptance.num_accepted"
PULLED, PULLED_TOKENS, FAILED_PULLS = "moves.num_pulled", "moves.num_pulled_tokens", "moves.num_failed"
COUNTS = (QUERIES, HITS, SWAPS, RECOMPUTES, DEPARTURES, DRAFTED, ACCEPTED, PULLED, PULLED_TOKENS, FAILED_PULLS)


class Executor(Protocol):
    """Something that executes plans in order."""

    @property
    def joined(self) -> ReplicaJoined:
        """The event with which it joins the scheduler."""

    def execute(self, plan: StepPlan, received_s: float, free_s: float) -> StepResult:
        """The result of a plan that came at ``received_s``; the device is free from ``free_s`` on."""


class Observer:
    """Receives the messages to detokenizers, ingresses and the log; its methods do nothing unless overridden."""

    def tokenized(self, at_s: float, request: TokenizedRequest) -> None:
        """The scheduler reads a request."""

    def started(self, at_s: float, started: SequenceStarted) -> None:
        """A sequence enters the batch of a replica for the first time."""

    def ended(self, at_s: float, ended: SequenceEnded) -> None:
        """The scheduler ended a sequence that had been started."""

    def failed(self, at_s: float, failed: RequestFailed) -> None:
        """A request was answered with an error."""

    def over(self, at_s: float, request_id: str) -> None:
        """Nothing is kept of a request any more (said again for each repeat of it)."""

    def planned(self, at_s: float, replica: str, plan: StepPlan) -> None:
        """A plan was sent."""

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        """The results of a step can be read."""

    def pulled(self, at_s: float, report: PullReport) -> None:
        """The scheduler reads of a pull that it has ended."""

    def noted(self, at_s: float, note: Note) -> None:
        """A line for the log."""


class Observers(Observer):
    """Tells several observers the same, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def tokenized(self, at_s: float, request: TokenizedRequest) -> None:
        for each in self._observers:
            each.tokenized(at_s, request)

    def started(self, at_s: float, started: SequenceStarted) -> None:
        for each in self._observers:
            each.started(at_s, started)

    def ended(self, at_s: float, ended: SequenceEnded) -> None:
        for each in self._observers:
            each.ended(at_s, ended)

    def failed(self, at_s: float, failed: RequestFailed) -> None:
        for each in self._observers:
            each.failed(at_s, failed)

    def over(self, at_s: float, request_id: str) -> None:
        for each in self._observers:
            each.over(at_s, request_id)

    def planned(self, at_s: float, replica: str, plan: StepPlan) -> None:
        for each in self._observers:
            each.planned(at_s, replica, plan)

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        for each in self._observers:
            each.result(at_s, replica, result)

    def pulled(self, at_s: float, report: PullReport) -> None:
        for each in self._observers:
            each.pulled(at_s, report)

    def noted(self, at_s: float, note: Note) -> None:
        for each in self._observers:
            each.noted(at_s, note)


@dataclass(slots=True, eq=False)
class Member:
    """One executor's life; times in seconds. ``free_s``: when its last step so far is done. ``has_left``: the scheduler
    knows that it is gone."""

    executor: Executor
    joined_s: float
    free_s: float = 0.0
    killed_s: float = NEVER_S
    busy_s: float = 0.0
    steps: int = 0
    has_left: bool = False

    @property
    def address(self) -> str:
        """Where others find its blocks; empty: nowhere."""
        return self.executor.joined.kv_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """See :class:`pagebus.actors.simulator.profile.Profile`. ``lease_ttl_s``: until a dead executor is noticed.
    ``stay_s``: the longest time that an executor which drains stays for those that pull from it."""

    bus_s: float = 0.0
    input_s: float = 0.0
    plan_s: float = 0.0
    lease_ttl_s: float = 5.0
    stay_s: float = 5.0


Action = Callable[[float], None]


class Simulation:
    """``check``: every invariant of the core is checked after every step. ``link``: of executors that pull blocks."""

    def __init__(
        self, config: CoreConfig, observer: Observer, timing: Timing, *, check: bool = False,
        link: LinkSpeed | None = None,
    ) -> None:  # fmt: skip
        self.core = Core(config)
        self.observer = observer
        self.members: dict[str, Member] = {}
        self.past: list[tuple[str, Member]] = []
        self.now_s = 0.0
        self.busy_s = 0.0
        """How long the scheduler worked, by the profile."""
        self.num_steps = self.num_events = self.swapped_out = self.swapped_in = self.num_moved = 0
        self.pull_wait_s = 0.0
        """How long sequences waited for pulls, all together."""
        self._counts: Counter[str] = Counter()
        self._timing = timing
        self._check = check
        self._heap: list[tuple[float, int, Member | None, object]] = []
        self._pushed = 0
        self._epochs = 0
        self._links = None if link is None else Links(link, self.at, self._pulled)
        self._by_address: dict[str, Member] = {}
        self._num_waiting, self._noted_s, self._looks_s = 0, 0.0, NEVER_S
        self.core.handle(DetokenizersLive(("text",)))

    def watch(self, observer: Observer) -> None:
        """Add an observer, called after those that there are."""
        self.observer = Observers(self.observer, observer)

    # -- what happens when --------------------------------------------------------------------------------------------
    def at(self, at_s: float, what: Input | Action) -> None:
        """The scheduler reads a message at a time, or ``what(at_s)`` is called then."""
        self._push(at_s, None, what)

    def _push(self, at_s: float, member: Member | None, what: object) -> None:
        self._pushed += 1
        heappush(self._heap, (at_s, self._pushed, member, what))

    def next_epoch(self) -> int:
        """A lease epoch, above all before it."""
        self._epochs += 1
        return self._epochs

    def join(self, at_s: float, executor: Executor) -> None:
        """An executor is ready now; one that had its name before is gone."""
        name = executor.joined.replica
        if name in self.members:
            self.kill(at_s, name)
            self._count(name, self._counts)
        member = self.members[name] = Member(executor, at_s, free_s=at_s)
        if self._links is not None and member.address:
            self._by_address[member.address] = member
            self._links.join(member.address)
        self.core.handle(executor.joined)

    def kill(self, at_s: float, name: str) -> None:
        """An executor dies. The scheduler notices when its lease has expired."""
        member = self.members.get(name)
        if member is None or member.killed_s <= at_s:
            return
        member.killed_s = at_s
        self._unlink(at_s, member)
        noticed_s = at_s + self._timing.lease_ttl_s
        self.at(noticed_s, lambda late_s: self._leave(late_s, member, "its lease expired"))

    def drain(self, at_s: float, name: str) -> None:
        """An executor is asked to end: it finishes the steps it has. If others may pull from it, it stays for them
        until its last plan."""
        member = self.members.get(name)
        if member is None or member.killed_s <= at_s:
            return
        self.core.handle(ReplicaSuspended(name, drains=True))
        done_s = max(at_s, member.free_s) + 2 * self._timing.bus_s
        leaves_s = max(done_s, at_s + self._timing.stay_s) if member.address else done_s
        self.at(leaves_s, lambda late_s: self._leave(late_s, member, "drained"))

    def _leave(self, at_s: float, member: Member, reason: str) -> None:
        if member.has_left:
            return
        member.has_left = True
        name = member.executor.joined.replica
        self._unlink(at_s, member)
        if self.members.get(name) is member:
            del self.members[name]
            self._count(name, self._counts)
            self.core.handle(ReplicaSuspended(name))
            self.core.handle(ReplicaLost(name, reason))
        member.killed_s = min(member.killed_s, self.now_s)
        self.past.append((name, member))

    def _count(self, name: str, counts: Counter[str]) -> None:
        if (replica := self.core.replicas.get(name)) is not None:
            for key in COUNTS:
                counts[key] += attrgetter(key)(replica)

    def totals(self) -> dict[str, int]:
        """Counts of all replicas there were: prefix lookups in tokens, and preemptions by kind."""
        counts = Counter(self._counts)
        for name in self.core.replicas:
            self._count(name, counts)
        return {key: counts[key] for key in COUNTS}

    # -- the loop -----------------------------------------------------------------------------------------------------
    def run(self, until_s: float = NEVER_S) -> None:
        """Until nothing happens any more, or ``until_s``."""
        heap, timing, core = self._heap, self._timing, self.core
        free_s = self.now_s
        while heap and heap[0][0] <= until_s:
            now_s = self.now_s = max(heap[0][0], free_s)
            inputs = 0
            while heap and heap[0][0] <= now_s:
                at_s, _, member, what = heappop(heap)
                inputs += not callable(what)
                self._handle(at_s, member, what)
            outputs = core.plan(now_s)
            plans = sum(type(output) is ToReplica for output in outputs)
            worked_s = inputs * timing.input_s + plans * timing.plan_s
            free_s = now_s + worked_s
            self.busy_s += worked_s
            for output in outputs:
                self._send(free_s, output)
            if self._links is not None:
                self._look_at_pulls(now_s)
            self.num_events += inputs
            if self._check:
                core.check_integrity()

    def _handle(self, at_s: float, member: Member | None, what: object) -> None:
        if member is not None:
            assert isinstance(what, StepResult)
            name = member.executor.joined.replica
            if what.done_s <= member.killed_s and self.members.get(name) is member:
                self.observer.result(at_s, name, what)
                self.core.handle(ReplicaResult(name, what))
        elif callable(what):
            what(at_s)
        else:
            if type(what) is TokenizedRequest:
                self.observer.tokenized(at_s, what)
            elif type(what) is PullReport:
                self.observer.pulled(at_s, what)
            self.core.handle(what)  # type: ignore[arg-type]

    def _send(self, at_s: float, output: object) -> None:
        match output:
            case ToReplica(replica, plan):
                self._execute(at_s, replica, plan)
            case ToDetokenizer(_, SequenceStarted() as started):
                self.observer.started(at_s, started)
            case ToDetokenizer(_, SequenceEnded() as ended):
                self.observer.ended(at_s, ended)
            case ToIngress(_, failed):
                self.observer.failed(at_s, failed)
            case Preempted(why=why):
                self.num_moved += why == MOVED
            case RequestOver(request_id):
                self.observer.over(at_s, request_id)
            case Note():
                self.observer.noted(at_s, output)

    def _execute(self, at_s: float, replica: str, plan: StepPlan) -> None:
        member = self.members[replica]
        self.num_steps += 1
        self.swapped_out += len(plan.swap_out_blocks)
        self.swapped_in += len(plan.swap_in_blocks)
        self.observer.planned(at_s, replica, plan)
        received_s = at_s + self._timing.bus_s
        if received_s >= member.killed_s:
            return
        if plan.is_last:
            self.at(received_s + self._timing.bus_s, lambda late_s: self._leave(late_s, member, "drained"))
            return
        if plan.pulls:
            self._pull(received_s, member, plan)
        result = member.executor.execute(plan, received_s, member.free_s)
        done_s = result.done_s
        if done_s > member.killed_s:
            return
        member.busy_s += done_s - max(received_s, member.free_s)
        member.free_s = done_s
        member.steps += 1
        self._push(done_s + self._timing.bus_s, member, result)

    # -- pulls --------------------------------------------------------------------------------------------------------
    def _pull(self, at_s: float, member: Member, plan: StepPlan) -> None:
        """Have an executor pull what a plan orders, usually behind the steps before it."""
        links, block_bytes = self._links, member.executor.joined.block_bytes
        assert links is not None
        for each in plan.pulls:
            transfer = Transfer(each.pull, each.address, member.address, each.num_blocks * block_bytes, each.hosts)
            self.at(at_s if each.at_once else max(at_s, member.free_s), partial(links.pull, transfer))

    def _pulled(self, at_s: float, transfer: Transfer, there: bool) -> None:
        """A transfer has ended: its executor reports."""
        joined = self._by_address[transfer.target].executor.joined
        seconds = max(at_s - transfer.began_s, 1e-9)
        report = PullReport(
            replica=joined.replica,
            executor_epoch=joined.epoch,
            scheduler_epoch=self.core.config.epoch,
            pull=transfer.number,
            there=there,
            bytes_per_s=transfer.num_bytes / seconds if there else 0.0,
            ended_s=at_s,
        )
        self.at(at_s + self._timing.bus_s, report)

    def _unlink(self, at_s: float, member: Member) -> None:
        """An executor is gone, and its cache with it."""
        if self._links is not None and self._by_address.pop(member.address, None) is not None:
            self._links.lose(at_s, member.address)

    def _look_at_pulls(self, now_s: float) -> None:
        """Add up how long sequences wait for pulls, and wake the scheduler for those that do not come."""
        pulls = self.core.planner.pulls
        self.pull_wait_s += self._num_waiting * (now_s - self._noted_s)
        self._noted_s, self._num_waiting = now_s, 0
        if not pulls.is_awaited:
            return
        self._num_waiting = sum(map(pulls.is_pulling, self.core.waiting))
        if self._looks_s <= now_s or self._looks_s == NEVER_S:
            self._looks_s = now_s + LOOK_S
            self.at(self._looks_s, lambda _: None)
