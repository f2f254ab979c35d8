"""Pulls of simulated executors: they take as long as they like, fail at random, and may bring garbage where nobody may
look. What holds of every pull is checked: blocks that are lent do not change, and who lends blocks does not end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pagebus.actors.executor.batch import checks
from pagebus.bus.messages import PullReport, StepPlan

GARBAGE = 13
TIMES_S = ((0.001, 0.05), (0.05, 2.0), (2.0, 40.0))
"""What a pull takes: mostly little, rarely longer than anybody waits for it."""


@dataclass(slots=True, eq=False)
class Cache:
    """Blocks [B, block_size] that others may pull, and those of the host tier. ``epoch`` is that of the scheduler whose
    plan came last. Of processes that are gone, a mapping may still give what was there."""

    blocks: np.ndarray
    hosts: np.ndarray
    epoch: int = 0
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class Order:
    """A pull under way; ``held``: what the lender had when it began."""

    number: int
    epoch: int
    address: str
    target: str
    sources: np.ndarray
    blocks: np.ndarray
    held: np.ndarray
    hosts: bool
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Links:
    """Between all executors of a world: caches by address, and what is under way. A share ``fails`` of the pulls fail;
    ``often`` says how often each of :data:`TIMES_S` is drawn.

    ``gave_up`` says of an address and the epoch of a scheduler, whether that does not count on this cache any more.
    """

    rng: random.Random
    fails: float = 0.0
    bytes_per_s: float = 1e7
    often: tuple[int, int, int] = (12, 4, 1)
    caches: dict[str, Cache] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    gave_up: Callable[[str, int], bool] = lambda address, epoch: True
    num_there: int = 0
    num_failed: int = 0

    def check_unread(self, address: str, epoch: int) -> None:
        """Nobody pulls from a cache whose executor may end."""
        readers = [each for each in self.orders if each.address == address and each.epoch == epoch]
        assert not [each for each in readers if not self.gave_up(each.target, epoch)], "an executor may end that lends"


class Pulls:
    """Of one executor. ``tell`` gets the reports."""

    def __init__(self, links: Links, cache: np.ndarray, hosts: np.ndarray, tell: Callable[[PullReport], None]) -> None:
        self._links, self._tell = links, tell
        self.address = f"cache-{len(links.caches)}"
        self._own = links.caches[self.address] = Cache(cache, hosts)
        self._early: set[int] = set()
        """Begun, of plans that are still to be carried out."""

    def begin(self, scheduler_epoch: int) -> None:
        """Another scheduler: nothing writes into the cache any more that an earlier one had ordered. It may have been
        there already."""
        self._own.epoch = scheduler_epoch
        for order in self._mine():
            self._own.blocks[order.blocks] = GARBAGE
            self._end(order)
            if self._links.rng.random() < 0.5:
                self._report(order, "")

    def take_early(self, plan: StepPlan, scheduler_epoch: int) -> None:
        """Begin those of a plan's pulls that may be at once, unless the plan is the first of another scheduler's."""
        if scheduler_epoch == self._own.epoch:
            self._early |= {pull.pull for pull in plan.pulls if pull.at_once}
            self._take(plan, scheduler_epoch, early=True)

    def take(self, plan: StepPlan, scheduler_epoch: int) -> None:
        """Begin the others."""
        checks.pulls(plan, len(self._own.blocks))
        if plan.is_last:
            assert not plan.pulls, "who is to end has nothing to pull"
            self._links.check_unread(self.address, scheduler_epoch)
        self._take(plan, scheduler_epoch, early=False)
        self._early -= {pull.pull for pull in plan.pulls}

    def _take(self, plan: StepPlan, scheduler_epoch: int, *, early: bool) -> None:
        start = 0
        for pull in plan.pulls:
            part = slice(start, start := start + pull.num_blocks)
            if early != (pull.pull in self._early):
                continue
            lender = self._links.caches[pull.address]
            sources, blocks = plan.pull_sources[part], plan.pull_blocks[part]
            assert pull.hosts or lender is not self._own
            held = (lender.hosts if pull.hosts else lender.blocks)[sources].copy()
            order = Order(pull.pull, scheduler_epoch, pull.address, self.address, sources, blocks, held, pull.hosts)
            self._begin(order)

    def end(self) -> None:
        """The executor is gone, and its cache with it."""
        self._own.is_gone = True
        for order in self._mine():
            self._end(order)

    def _mine(self) -> list[Order]:
        return [each for each in self._links.orders if each.target == self.address]

    def _begin(self, order: Order) -> None:
        links = self._links
        written = [block for each in self._mine() for block in each.blocks.tolist()]
        assert not set(written) & set(order.blocks.tolist()), "two pulls write one block"
        self._own.blocks[order.blocks] = GARBAGE
        seconds = links.rng.uniform(*links.rng.choices(TIMES_S, links.often)[0])
        order.timer = asyncio.get_running_loop().call_later(seconds, self._finish, order)
        links.orders.append(order)

    def _finish(self, order: Order) -> None:
        """Of each block, it came early or late. The lender may be gone, which is noticed or does not matter. What
        comes from one that its scheduler has given up may be anything."""
        links, lender = self._links, self._links.caches[order.address]
        given_up = links.gave_up(order.address, order.epoch)
        late = (lender.hosts if order.hosts else lender.blocks)[order.sources]
        if not given_up and lender.epoch == order.epoch:
            assert (late == order.held).all(), "blocks change that are lent"
            assert (late != 0).all(), "a block is pulled that was never written"
        self._end(order)
        error = "it was to fail" if links.rng.random() < links.fails else ""
        if lender.is_gone and links.rng.random() < 0.5:
            error = "its process is gone"
        is_garbage = given_up and links.rng.random() < 0.5  # which the report then does not say
        if not (error or is_garbage):
            early = np.array([links.rng.random() < 0.5 for _ in order.blocks])
            self._own.blocks[order.blocks] = np.where(early[:, None], order.held, late)
        self._report(order, error)

    def _end(self, order: Order) -> None:
        self._links.orders.remove(order)
        if order.timer is not None:
            order.timer.cancel()

    def _report(self, order: Order, error: str) -> None:
        self._links.num_there += not error
        self._links.num_failed += bool(error)
        report = PullReport(
            replica="", executor_epoch=0, scheduler_epoch=order.epoch, pull=order.number, there=not error,
            bytes_per_s=0.0 if error else self._links.bytes_per_s, error=error,
        )  # fmt: skip
        self._tell(report)
