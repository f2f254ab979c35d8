"""Pulls of a fake executor, which copies as late as it may, and does its worst where nobody may look."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagebus.bus.messages import PullReport, StepPlan

GARBAGE = 13
Lenders = dict[str, tuple[np.ndarray, np.ndarray]]
"""By address the caches and host tiers of executors that live."""


@dataclass
class Order:
    """One pull of a plan."""

    number: int
    epoch: int
    address: str
    sources: list[int]
    blocks: list[int]
    hosts: bool
    told: list[int] = field(default_factory=list)
    """Ranks that have said what became of their parts."""
    fails: bool = False
    promised: int = 0
    """The last plan that need not find it there; 0: it is not promised."""
    is_there: bool = False


@dataclass
class FakePulls:
    """Executors of one ``kind`` can pull from each other. Every so many pulls (``fails``) one fails; 0: none does."""

    kind: str = ""
    fails: int = 0
    bytes_per_s: float = 1e6
    num_done: int = 0
    num_failed: int = 0
    lenders: Lenders = field(default_factory=Lenders)
    """For all of them to share."""
    host: str = ""
    """Whose executors can read each other's host tiers; empty: nobody reads this one's."""
    ranks: int = 1
    """Of the executor. Each pulls a part of every block; the pull is there with the last one, and fails with any."""
    promises: int = 0
    """Of so many pulls of one rank, one is promised before it is there. It is copied as late as it may, then."""

    def begin(self, cache: np.ndarray, memory: np.ndarray, name: str, epoch: int) -> None:
        """An executor with this cache and host tier has them."""
        self.orders: deque[Order] = deque()
        self._last_plan = 0
        self._cache, self._name, self._epoch = cache, name, epoch
        self.address = f"{name}@{epoch}" if self.kind else ""
        if self.kind:
            self.lenders[self.address] = cache, memory

    def end(self) -> None:
        """Its executor is gone, and its cache with it."""
        self.lenders.pop(self.address, None)
        self._cache[:] = GARBAGE

    @property
    def kv_host(self) -> str:
        """As of :class:`ReplicaJoined`."""
        return self.host if self.kind else ""

    @property
    def written(self) -> set[int | None]:
        """Blocks into which something may be copied at any time."""
        return {block for order in self.orders if not order.is_there for block in order.blocks}

    def take(self, plan: StepPlan, scheduler_epoch: int, *, at_once: bool = False) -> None:
        """Begin a plan's pulls: the one kind when the plan comes, the other when it is carried out."""
        assert not (plan.is_last and plan.pulls), "who is to end has nothing to pull"
        self._last_plan = max(plan.step, self._last_plan)
        sources, blocks = plan.pull_sources.tolist(), plan.pull_blocks.tolist()
        for pull in plan.pulls:
            count = pull.num_blocks
            assert count > 0
            assert pull.address != self.address or pull.hosts
            if pull.at_once != at_once:
                del sources[:count], blocks[:count]
                continue
            order = Order(pull.pull, scheduler_epoch, pull.address, sources[:count], blocks[:count], pull.hosts)
            assert not self.written & set(order.blocks), "two pulls write one block"
            self.orders.append(order)
            del sources[:count], blocks[:count]
            self._cache[order.blocks] = GARBAGE
        assert not sources
        assert not blocks

    def pull_one(self) -> PullReport:
        """Have a rank do its part of the oldest, another one each time. What comes from an executor that is gone is
        wrong, though this one does not notice."""
        order = self.orders[0]
        if self.promises and self.ranks == 1 and order.number % self.promises == 0 and not order.promised:
            order.promised = self._last_plan
            return self._report(order, there=True, promised=True)
        rank = (order.number + len(order.told)) % self.ranks
        order.told.append(rank)
        is_last = len(order.told) == self.ranks
        self.num_done += 1
        there = order.promised > 0 or not self.fails or self.num_done % self.fails != 0
        self.num_failed += not there
        order.fails |= not there
        if is_last:
            self.orders.popleft()
        if is_last and not order.fails:
            self._copy(order)
        return self._report(order, there=there, rank=rank)

    def keep_promises(self, step: int) -> None:
        """What was promised before this plan was written is there for it."""
        for order in self.orders:
            if 0 < order.promised < step:
                self._copy(order)

    def _copy(self, order: Order) -> None:
        if order.address in self.lenders and not order.is_there:
            held = self.lenders[order.address][order.hosts][order.sources]
            assert (held != 0).all(), "a block is pulled that was never written"
            self._cache[order.blocks] = held
            order.is_there = True

    def _report(self, order: Order, *, there: bool, rank: int = 0, promised: bool = False) -> PullReport:
        return PullReport(
            replica=self._name, executor_epoch=self._epoch, scheduler_epoch=order.epoch, pull=order.number,
            there=there, bytes_per_s=self.bytes_per_s if there else 0.0, error="" if there else "it was to fail",
            rank=rank, ranks=self.ranks, promised=promised,
        )  # fmt: skip
