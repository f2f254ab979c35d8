"""Pulls as plans order them: their order, their reports, sources that hang, and another scheduler."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.executor.batch import checks
from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.moves import puller
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.group import Group
from pagebus.actors.executor.moves.moves import Moves
from pagebus.actors.executor.moves.puller import Pull, Puller
from pagebus.actors.executor.moves.source import Source
from pagebus.bus.messages import BlockPull, Int32Array, PullReport, StepPlan
from pagebus.bus.messages.moves import PATIENCE_S
from tests.actors.executor.moves.caches import BLOCK_BYTES, FIRST_HOST, NUM_BLOCKS, LocalCache, content
from tests.helpers.engine_driver import ints
from tests.helpers.waiting import LIMIT_S

Order = tuple[Address, list[int], list[int]]
"""(source, its blocks, own blocks)."""


def plan_of(*orders: Order, first: int = 1) -> StepPlan:
    return StepPlan(
        step=1,
        planned_s=0.0,
        num_decodes=0,
        pulls=tuple(
            BlockPull(pull=first + number, address=address.text(), num_blocks=len(sources))
            for number, (address, sources, _) in enumerate(orders)
        ),
        pull_sources=ints([block for _, sources, _ in orders for block in sources]),
        pull_blocks=ints([block for _, _, targets in orders for block in targets]),
    )


class Target:
    """An executor's cache that pulls, and its reports."""

    def __init__(self, *, network: bool = False) -> None:
        self.cache = LocalCache()
        self.reports: queue.Queue[PullReport] = queue.Queue()
        group = Group(0, (self.cache.address,), "kind")
        self.moves = Moves(self.cache.own, self.cache.blocks, group, self.reports.put, network=network)

    def order(self, *orders: Order, first: int = 1, epoch: int = 1) -> None:
        self.moves.apply(plan_of(*orders, first=first), epoch, lambda: None)

    def report(self) -> PullReport:
        return self.reports.get(timeout=LIMIT_S)


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target(network=True)
    yield made
    made.moves.close()


@pytest.fixture
def source() -> LocalCache:
    return LocalCache(filled=True)


@pytest.fixture
def hung() -> Iterator[Address]:
    """The address of a cache whose server says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        yield replace(LocalCache().address, host="elsewhere", name="127.0.0.1", port=port, secret="00" * 32)


def test_each_pull_gets_its_report(target: Target, source: LocalCache) -> None:
    """With its number, its scheduler's epoch, how fast it was and when; who says so is for the actor to add."""
    began_s = time.time()
    target.order((source.address, [3, 4, 9], [1, 2, 3]), (source.address, [0], [7]), first=5, epoch=9)
    first, second = target.report(), target.report()
    assert (first.pull, second.pull, first.scheduler_epoch) == (5, 6, 9)
    assert first.there
    assert second.there
    assert first.bytes_per_s > 0
    assert began_s <= first.ended_s <= second.ended_s <= time.time()
    assert (first.replica, first.executor_epoch, first.error) == ("", 0, "")
    assert target.cache.holds([3, 4, 9, 0], [1, 2, 3, 7])


def test_blocks_come_from_host_tiers(target: Target, source: LocalCache) -> None:
    """A neighbour's, and one's own; in one plan with those of a device."""
    target.cache.memory.block(8)[:] = content(77)
    own, near = target.cache.address.text(), source.address.text()
    pulls = [(1, near, 2, True), (2, near, 1, False), (3, own, 1, True)]
    plan = StepPlan(
        step=1, planned_s=0.0, num_decodes=0,
        pulls=tuple(BlockPull(pull=a, address=b, num_blocks=c, hosts=d) for a, b, c, d in pulls),
        pull_sources=ints([3, 39, 4, 8]), pull_blocks=ints([1, 2, 3, 4]),
    )  # fmt: skip
    target.moves.apply(plan, 1, lambda: None)
    assert {(told.pull, told.there) for told in (target.report() for _ in pulls)} == {(1, True), (2, True), (3, True)}
    assert target.cache.holds([FIRST_HOST + 3, FIRST_HOST + 39, 4, 77], [1, 2, 3, 4])


def test_what_may_begin_at_once_does_not_wait_for_its_plan(target: Target, source: LocalCache) -> None:
    """The other pull of the plan does. Once the plan is applied each has been made once."""
    plan = plan_of((source.address, [3], [1]), (source.address, [4], [2]), first=5)
    plan = replace(plan, pulls=(replace(plan.pulls[0], at_once=True), plan.pulls[1]))
    target.moves.begin(plan, 1)
    target.order(first=1)
    target.moves.begin(plan, 1)
    assert target.report().pull == 5
    assert target.cache.holds([3], [1])
    target.moves.apply(plan, 1, lambda: None)
    assert target.report().pull == 6
    assert target.cache.holds([3, 4], [1, 2])
    target.moves.apply(plan_of((source.address, [9], [3]), first=7), 1, lambda: None)
    assert target.report().pull == 7


def test_a_plan_of_another_scheduler_begins_nothing_before_its_turn(target: Target, source: LocalCache) -> None:
    """What the one before has ordered may still be on its way."""
    plan = plan_of((source.address, [3], [1]))
    plan = replace(plan, pulls=(replace(plan.pulls[0], at_once=True),))
    target.order(first=1)
    target.moves.begin(plan, 2)
    target.moves.apply(plan, 2, lambda: None)
    assert target.report().pull == 1
    assert target.reports.empty()


def test_a_plan_that_comes_while_the_pulls_before_end_begins_nothing(
    target: Target, source: LocalCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may still write to its blocks."""
    plan = plan_of((source.address, [3], [1]))
    plan = replace(plan, pulls=(replace(plan.pulls[0], at_once=True),))
    rest = target.moves._rest

    def begin_and_rest() -> None:
        target.moves.begin(plan, 2)
        rest()

    target.order(first=1)
    monkeypatch.setattr(target.moves, "_rest", begin_and_rest)
    target.order(first=1, epoch=2)
    assert target.reports.empty()
    target.moves.apply(plan, 2, lambda: None)
    assert target.report().pull == 1


def test_pulls_from_one_source_keep_their_order(target: Target, source: LocalCache) -> None:
    """The later one overwrites."""
    for block in range(NUM_BLOCKS):
        target.order((source.address, [block], [5]), first=block)
    assert [target.report().pull for _ in range(NUM_BLOCKS)] == list(range(NUM_BLOCKS))
    assert target.cache.holds([NUM_BLOCKS - 1], [5])


def test_a_pull_that_fails_is_reported_and_nothing_else(target: Target, source: LocalCache) -> None:
    """The next one may succeed; an address that cannot be read is no worse."""
    target.order((replace(source.address, nonce="ab" * 16), [1], [1]))
    told = target.report()
    assert (told.there, told.bytes_per_s) == (False, 0.0)
    assert "does not have this cache" in told.error
    target.order((source.address, [1], [1]))
    assert target.report().there
    plan = replace(plan_of((source.address, [1], [2])), pulls=(BlockPull(pull=8, address="nowhere", num_blocks=1),))
    target.moves.apply(plan, 1, lambda: None)
    assert "cannot be read" in target.report().error


def test_a_source_that_hangs_holds_up_its_own_pulls_alone(target: Target, source: LocalCache, hung: Address) -> None:
    target.order((hung, [1], [1]), (source.address, [2], [2]), (hung, [3], [3]))
    assert target.report().pull == 2
    assert target.reports.empty()


def test_another_scheduler_begins_when_nothing_is_written_any_more(
    target: Target, source: LocalCache, hung: Address
) -> None:
    """Its predecessor's pulls are abandoned, and nobody hears of them; its own are reported in its name."""
    target.order((hung, [1], [1]), (hung, [1], [2]))
    target.order((source.address, [5], [1]), first=7, epoch=2)
    told = target.report()
    assert (told.pull, told.scheduler_epoch, told.there) == (7, 2, True)
    assert target.cache.holds([5], [1])
    assert target.reports.empty()


def test_a_plan_without_pulls_of_another_scheduler_waits_too(target: Target, hung: Address) -> None:
    """It may give the blocks to sequences."""
    target.order((hung, [1], [1]))
    target.moves.apply(StepPlan(step=1, planned_s=0.0, num_decodes=0), 2, lambda: None)
    assert target.moves._busy == 0


def test_closing_abandons_what_is_under_way(source: LocalCache, hung: Address) -> None:
    """And nobody can read the cache any more."""
    target = Target(network=True)
    seen = target.cache.address
    target.order((hung, [1], [1]))
    target.moves.close()
    assert target.reports.empty()
    other = Target()
    other.order((seen, [1], [1]))
    assert not other.report().there
    other.moves.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pull_blocks": ints([0, NUM_BLOCKS])}, f"pull_blocks holds {NUM_BLOCKS}"),
        ({"pull_blocks": ints([0, -1])}, "pull_blocks holds -1"),
        ({"pull_sources": ints([0, -1])}, "pull_sources holds -1"),
        ({"pull_sources": ints([0])}, "has 1 entries"),
        ({"pull_blocks": ints([3, 3])}, "a block twice"),
        ({"pulls": ()}, "the pulls need 0"),
        ({"pulls": (BlockPull(pull=1, address="", num_blocks=3),)}, "the pulls need 3"),
        ({"pulls": (BlockPull(pull=1, address="", num_blocks=0),)}, "at least 1 each"),
    ],
)
def test_plans_that_make_no_sense_are_refused(source: LocalCache, change: dict[str, Any], text: str) -> None:
    """Before anything is written."""
    plan = plan_of((source.address, [1, 2], [3, 4]))
    checks.pulls(plan, NUM_BLOCKS)
    with pytest.raises(PlanError, match=text):
        checks.pulls(replace(plan, **change), NUM_BLOCKS)


# -- the thread of one source -----------------------------------------------------------------------------------------


class Gate:
    """An event that the test opens."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def synchronize(self) -> None:
        assert self.opened.wait(LIMIT_S)


def new_puller(source: LocalCache, own: LocalCache, done: Callable[[str], None], look_s: float = 60.0) -> Puller:
    """Errors go to ``done``."""
    return Puller(
        lambda: None,
        lambda: Source(source.address, own.blocks, network=False),
        lambda pull, seconds, error: done(error),
        lambda epoch: False,
        look_s,
    )


def test_a_pull_begins_behind_what_the_plan_is_behind(source: LocalCache) -> None:
    """What steps and copies before it leave in its blocks is there until then."""
    own, gate, told = LocalCache(), Gate(), queue.Queue[str]()
    thread = new_puller(source, own, told.put)
    assert thread.add([Pull(1, 1, ints([4]), ints([2]), (gate,))])
    own.bytes[2] = 9
    assert own.bytes[2].tolist() == [9] * BLOCK_BYTES
    gate.opened.set()
    assert told.get(timeout=LIMIT_S) == ""
    assert np.array_equal(own.bytes[2], content(4))
    thread.close()


def test_a_pull_that_takes_too_long_is_given_up(source: LocalCache) -> None:
    """Its report gives the blocks back; those behind it are not held up."""
    own, told = LocalCache(), queue.Queue[str]()
    thread = new_puller(source, own, told.put)
    old = Pull(1, 1, ints([4]), ints([2]), ordered_s=time.monotonic() - PATIENCE_S - 1)
    assert thread.add([old, Pull(2, 1, ints([5]), ints([3]))])
    assert told.get(timeout=LIMIT_S) == "not there after 10 s"
    assert told.get(timeout=LIMIT_S) == ""
    assert np.array_equal(own.bytes[3], content(5))
    assert not own.bytes[2].any()
    thread.close()


def test_what_opens_a_source_does_not_count_as_time_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is copied before, so that a small first pull does not look like one over a slow link."""
    copied: list[int] = []
    now_s = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now_s, monotonic=time.monotonic)
    monkeypatch.setattr("pagebus.actors.executor.moves.puller.time", clock)

    class Slow:
        is_gone = False

        def prepare(self, sources: Int32Array, *, hosts: bool) -> None:
            nonlocal now_s
            now_s += 3.0

        def copy(self, sources: Int32Array, *_: object, hosts: bool, early: object) -> None:
            nonlocal now_s
            now_s += 0.01 if copied else 5.0
            copied.append(len(sources))

        def close(self) -> None:
            pass

    told = queue.Queue[float]()
    thread = Puller(
        lambda: None,
        lambda: cast("Source", Slow()),
        lambda pull, seconds, error: told.put(seconds),
        lambda epoch: False,
    )
    for _ in range(2):
        assert thread.add([Pull(1, 1, ints([4, 5]), ints([2, 3]))])
        assert told.get(timeout=LIMIT_S) == pytest.approx(0.01)
    thread.close()
    assert copied == [1, 2, 2]


@pytest.mark.parametrize("cause", ["the source is gone", "nobody pulls"])
def test_the_thread_ends_without_need(source: LocalCache, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    """So that neither threads nor another's memory are kept for long."""
    monkeypatch.setattr(puller, "IDLE_LOOKS", 3 if cause == "nobody pulls" else 10**9)
    told = queue.Queue[str]()
    thread = new_puller(source, LocalCache(), told.put, look_s=0.001)
    while thread.add([Pull(1, 1, ints([4]), ints([2]))]):
        assert told.get(timeout=LIMIT_S) is not None
        if cause == "the source is gone":
            source.own.close()
        thread._thread.join(0.05)
    assert thread.has_ended
    thread.close()
