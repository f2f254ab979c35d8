"""Pulls blocks from other executors' caches, as plans order, and lets others pull from the own one.

Steps wait for none of this: the scheduler names a pulled block in no plan before it has read the report. A pull that
fails costs speed only, because its blocks are then computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.actors.executor.batch import checks
from pagebus.actors.executor.device.device import new_event
from pagebus.actors.executor.device.errors import EngineError, PlanError
from pagebus.actors.executor.device.promises import Promises
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.divided import DividedSource
from pagebus.actors.executor.moves.group import Group
from pagebus.actors.executor.moves.own_cache import OwnCache
from pagebus.actors.executor.moves.puller import Pull, Puller, Waits
from pagebus.actors.executor.moves.source import Source
from pagebus.bus.messages import BlockPull, Int32Array, PullReport, StepPlan

PAUSE_LIMIT_S = 60.0
"""Longest wait for pulls when another scheduler begins; they see that they are outdated long before."""
_POLL_S = 0.001

Mark = Callable[[], torch.cuda.Event | None]


class Moves:
    """Moves of one rank of a ``group``. ``own`` is the rank's cache as others see it, ``blocks`` is the same as this
    executor uses it. ``network``: pull over TCP, too. ``tell`` is called from any thread with reports, which the actor
    completes."""

    def __init__(
        self, own: OwnCache, blocks: Blocks, group: Group, tell: Callable[[PullReport], None], *, network: bool
    ) -> None:
        self.kv_kind, self.kv_address, self.kv_host = group.kind, group.address, group.host
        self._own, self._blocks, self._group, self._tell, self._network = own, blocks, group, tell, network
        self._pullers: dict[str, Puller] = {}
        self._epoch = self._rested_epoch = 0
        """The newest scheduler, and the newest one for whose predecessors no pull is under way any more."""
        self._begun: set[int] = set()
        """Pulls whose plans are still to be applied."""
        self._busy = 0
        self._closing = False
        self.promises = Promises()
        self._lock = threading.Lock()

    def begin(self, plan: StepPlan, scheduler_epoch: int) -> None:
        """Begin those pulls of a plan that may begin at once. One thread, before the plan's :meth:`apply`, which begins
        the others; and all of a new scheduler's first plan, once the pulls of the scheduler before have ended."""
        if scheduler_epoch != self._rested_epoch or not any(each.at_once for each in plan.pulls):
            return
        try:
            checks.pulls(plan, self._blocks.num_blocks)
        except PlanError:
            return  # apply raises it, after the steps before
        for each, sources, targets in _divided(plan):
            if each.at_once:
                self._begun.add(each.pull)
                self._order(each.address, Pull(each.pull, scheduler_epoch, sources, targets, hosts=each.hosts))

    def apply(self, plan: StepPlan, scheduler_epoch: int, mark: Mark) -> None:
        """Begin a plan's other pulls. Device thread, after the plan's copies; ``mark`` makes an event behind these.

        Raises:
            PlanError: a block does not exist, or the counts do not add up.
            EngineError: pulls for another scheduler do not end.
        """
        if scheduler_epoch != self._epoch:
            self._epoch = scheduler_epoch
            self._rest()
            self.promises.forget()
            self._rested_epoch = scheduler_epoch
        if not (plan.pulls or len(plan.pull_sources) or len(plan.pull_blocks)):
            return
        checks.pulls(plan, self._blocks.num_blocks)
        numbers = {each.pull for each in plan.pulls}
        begun = self._begun & numbers
        self._begun -= numbers
        if len(begun) == len(numbers):
            return
        after = _events(mark)
        for each, sources, targets in _divided(plan):
            if each.pull not in begun:
                self._order(each.address, Pull(each.pull, scheduler_epoch, sources, targets, after, hosts=each.hosts))

    def close(self) -> None:
        """Abandon what is not there yet, end the threads, and let nobody read the own cache any more."""
        self._closing = True
        for puller in self._pullers.values():
            puller.close()
        self._own.close()

    def _order(self, address: str, pull: Pull) -> None:
        with self._lock:
            self._busy += 1
            puller = self._pullers.get(address)
            if puller is not None and puller.add([pull]):
                return
            for ended in [name for name, each in self._pullers.items() if each.has_ended]:
                del self._pullers[ended]
            puller = Puller(
                self._blocks.prepare_thread, partial(self._source, address), self._done, self._outdated,
                promise=self._promise if len(self._group.ranks) == 1 else None,
            )  # fmt: skip
            puller.add([pull])
            self._pullers[address] = puller

    def _source(self, address: str) -> Source | DividedSource:
        memory = self._own.memory if address == self.kv_address else None
        lenders = self._group.lenders(Address.parse(address))
        (lender, cuts), *others = lenders
        if cuts or others:
            return DividedSource(lenders, self._blocks, network=self._network)
        return Source(lender, self._blocks, network=self._network, memory=memory)

    def _rest(self) -> None:
        """Wait until no pull writes: another scheduler knows nothing of the blocks."""
        deadline_s = time.monotonic() + PAUSE_LIMIT_S
        while self._busy:
            if time.monotonic() > deadline_s:
                raise EngineError(f"blocks of another executor have been on their way for {PAUSE_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)

    # -- the pullers' threads -----------------------------------------------------------------------------------------
    def _outdated(self, scheduler_epoch: int) -> bool:
        return self._closing or scheduler_epoch != self._epoch

    def _promise(self, pull: Pull, event: torch.cuda.Event) -> None:
        if self._outdated(pull.scheduler_epoch):
            return
        self.promises.give(pull.number, event)
        self._tell(PullReport(
            replica="", executor_epoch=0, scheduler_epoch=pull.scheduler_epoch, pull=pull.number, there=True,
            ended_s=time.time(), promised=True,
        ))  # fmt: skip

    def _done(self, pull: Pull, seconds: float, error: str) -> None:
        self.promises.end(pull.number, error)
        rate = 0.0 if error else len(pull.targets) * self._group.block_bytes / max(seconds, 1e-9)
        report = PullReport(
            replica="", executor_epoch=0, scheduler_epoch=pull.scheduler_epoch, pull=pull.number, there=not error,
            bytes_per_s=rate, error=error, ended_s=time.time(), rank=self._group.rank, ranks=len(self._group.ranks),
        )  # fmt: skip
        if not (error and self._outdated(pull.scheduler_epoch)):
            self._tell(report)
        with self._lock:
            self._busy -= 1


def _divided(plan: StepPlan) -> Iterator[tuple[BlockPull, Int32Array, Int32Array]]:
    """Each pull of a plan, its sources and its targets."""
    start = 0
    for each in plan.pulls:
        part = slice(start, start := start + each.num_blocks)
        yield each, plan.pull_sources[part], plan.pull_blocks[part]


def _events(mark: Mark) -> tuple[Waits, ...]:
    """On a GPU, events behind the copies so far and behind the steps before."""
    copied = mark()
    if copied is None:
        return ()
    launched = new_event(blocking=True)
    launched.record()
    return launched, copied
