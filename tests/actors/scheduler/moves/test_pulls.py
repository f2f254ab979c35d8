"""Blocks pulled from another replica: who waits for them, what they save, and what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from pagebus.actors.scheduler.events import MOVED, CachesReset, ReplicaSuspended
from pagebus.actors.scheduler.moves.link import MOST_FAILURES
from pagebus.bus.messages import AbortRequest
from pagebus.bus.messages.moves import PATIENCE_S
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.moves.fake_pulls import FakePulls, Lenders
from tests.actors.scheduler.world import World, prompt, request

LONG = prompt(40, seed=5)
SMALL = {"max_num_seqs": 1, "copy_tokens": 0.1, "num_blocks": 32}
WINDOWED = {"windowed_pages": 2, "windowed_tokens": 6, "num_blocks": 80}


class Pair:
    """Two replicas with room for one sequence each, of which the first has the prompt ``LONG``."""

    def __init__(self, config: dict[str, Any] | None = None, **options: Any) -> None:
        self.world = World(**(config or {}))
        self.lenders: Lenders = {}
        self.options = {**SMALL, **options}
        self.lender = self.join("gpu-0", 2)
        self.world.send(request("first", LONG, max_tokens=2))
        self.world.run()
        self.target = self.join("gpu-1", 3)

    def join(self, name: str, epoch: int, **pulls: Any) -> FakeExecutor:
        pulled = FakePulls(**{"kind": "alike", "lenders": self.lenders, **pulls})
        return self.world.join(name=name, epoch=epoch, pulls=pulled, **self.options)

    def occupy(self, name: str = "busy") -> None:
        """A sequence that keeps the lender's only slot for long."""
        self.world.send(request(name, LONG[:4], max_tokens=60))
        assert name in self.running("gpu-0")

    def running(self, replica: str) -> list[str]:
        return [each.request.id for each in self.world.core.replicas[replica].slots.occupied()]

    def end(self) -> None:
        self.world.run()
        self.world.check_end()

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks that the target has pulled, and those that it could not."""
        moves = self.world.core.replicas["gpu-1"].moves
        return moves.num_pulled, moves.num_failed


@pytest.mark.parametrize("options", [{}, WINDOWED, {"num_drafts": 3}, {"stages": 2}])
def test_what_another_replica_has_computed_is_pulled(options: dict[str, Any]) -> None:
    """The second asks for the prompt; all but its last block comes from the first."""
    pair = Pair(**options)
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.end()
    assert pair.counts == (9 * (1 + options.get("windowed_pages", 0)) - pages_behind(options), 0)
    assert pair.world.core.replicas["gpu-0"].moves.num_lent == pair.counts[0]
    assert pair.target.num_computed <= 40 - 36 + 2 + 3 * options.get("num_drafts", 0)


def pages_behind(options: dict[str, Any]) -> int:
    """Pages of windowed layers that lie behind the window: only the last three blocks have theirs pulled."""
    return 0 if not options.get("windowed_pages") else (9 - 2) * options["windowed_pages"]


def test_who_waits_for_a_pull_has_no_slot_and_holds_up_nobody() -> None:
    """A short prompt behind it runs and ends while nothing has been copied."""
    pair = Pair()
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    assert pair.target.queue
    assert pair.running("gpu-1") == []
    pair.world.send(request("short", prompt(3, seed=8), max_tokens=2))
    assert pair.running("gpu-1") == ["short"]
    while pair.target.queue:
        pair.world.step("gpu-1")
    assert "short" in pair.world.over
    assert len(pair.world.core.planner.pulls) == 1
    pair.end()


def test_two_who_want_the_same_wait_for_one_pull() -> None:
    pair = Pair()
    pair.occupy()
    for name in ("second", "third"):
        pair.world.send(request(name, LONG, max_tokens=3))
    assert len(pair.world.core.planner.pulls) == 1
    pair.end()
    assert pair.counts == (9, 0)
    assert pair.target.num_computed < 40


def test_a_pull_waits_until_its_blocks_have_been_computed() -> None:
    """They can be found as soon as their step is planned."""
    pair = Pair()
    other = prompt(40, seed=7)
    pair.world.send(request("hog", LONG, max_tokens=30))
    pair.world.send(request("new", other, max_tokens=1))
    assert pair.running("gpu-1") == ["new"]
    pair.join("gpu-2", 4)
    pair.world.send(request("again", other, max_tokens=1))
    replica = pair.world.core.replicas["gpu-2"]
    assert not any(plan.pulls for plan in pair.world.executors["gpu-2"].plans)
    pair.world.step("gpu-1")
    assert any(plan.pulls for plan in pair.world.executors["gpu-2"].plans)
    pair.end()
    assert replica.moves.num_pulled == 9


@pytest.mark.parametrize("drains", [False, True])
def test_an_idle_lender_is_asked_whether_its_blocks_are_loaded(drains: bool) -> None:
    """Its last result came before the copies from its host tier had ended, and it has nothing more to compute."""
    pair = Pair({"num_prefill": 1, "preemption_mode": "swap"}, num_host_blocks=60, copy_lag=2)
    pair.world.kill("gpu-1")
    for seed in (6, 7, 8):
        pair.world.send(request(f"filler {seed}", prompt(60, seed=seed), max_tokens=1))
    pair.world.send(request("again", LONG, max_tokens=1))
    pair.world.run()
    replica = pair.world.core.replicas["gpu-0"]
    assert not replica.has_landed(replica.step)
    pair.join("gpu-1", 4)
    if drains:
        pair.world.send(request("second", LONG, max_tokens=3), ReplicaSuspended("gpu-0", drains=True))
    else:
        pair.world.send(request("second", LONG, max_tokens=3))
    pair.end()
    assert pair.counts == (9, 0)


def test_what_cannot_be_pulled_is_computed_and_a_bad_lender_is_left_alone() -> None:
    """The garbage that a failed pull leaves is in no block table."""
    pair = Pair()
    pair.target.pulls.fails = 1
    for number in range(MOST_FAILURES + 2):
        pair.world.send(CachesReset())
        pair.world.send(request(f"anew {number}", LONG, max_tokens=60))
        while f"anew {number}" in pair.running("gpu-1"):
            pair.world.step("gpu-1")
        for _ in range(4):
            pair.world.step("gpu-0") if pair.lender.queue else None
        pair.world.send(request(f"second {number}", LONG, max_tokens=3))
        pair.end()
    assert pair.counts[0] == 0
    assert pair.target.pulls.num_done == MOST_FAILURES


def test_a_slow_link_is_not_used() -> None:
    """The first pull tells how slow it is."""
    pair = Pair(copy_tokens=3.0)
    pair.target.pulls.bytes_per_s = 100.0
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=1))
    pair.end()
    other = prompt(40, seed=9)
    pair.world.send(request("third", other, max_tokens=1))
    pair.world.run()
    pair.occupy("busy again")
    pair.world.send(request("fourth", other, max_tokens=1))
    pair.end()
    assert pair.counts == (9, 0)


def test_link_and_device_share_what_many_want() -> None:
    """Here a pull takes half the time of computing: two thirds of what a drain moves are pulled, and the rest is
    computed meanwhile."""
    count, lenders = 24, Lenders()
    world = World()
    for number in range(2):
        pulled = FakePulls(kind="alike", lenders=lenders, bytes_per_s=500.0)  # four tokens have 1000 bytes
        world.join(
            name=f"gpu-{number}", epoch=number + 1, pulls=pulled, num_blocks=800, max_num_seqs=count, budget=2000
        )
        if number == 0:
            world.send(*(request(f"r{each}", prompt(40, seed=each), max_tokens=20) for each in range(count)))
            world.step("gpu-0")
    pulls, replicas = world.core.planner.pulls, world.core.replicas
    pulls.link(replicas["gpu-0"], replicas["gpu-1"]).ended(9, there=True, bytes_per_s=500.0)
    world.send(ReplicaSuspended("gpu-0", drains=True))
    while len(world.core.waiting) == count:
        world.step("gpu-0")
    assert 6 <= len(replicas["gpu-1"].slots) <= 10
    world.run()
    world.check_end()


@pytest.mark.parametrize("name", ["gpu-0", "gpu-1"])
@pytest.mark.parametrize("phase", ["ordered", "running"])
def test_a_replica_dies_under_a_pull(name: str, phase: str) -> None:
    """Both pools are whole at once, but for what the target may still write; what it says later is not believed."""
    pair = Pair()
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    if phase == "running":
        pair.world.step("gpu-1")
    pair.world.kill(name)
    pulls = pair.world.core.planner.pulls
    assert not any(pulls.is_pulling(each) for each in pair.world.core.waiting)
    if name == "gpu-1":
        assert not len(pulls)
    pair.end()
    assert all(not each.moves.num_pulled for each in pair.world.core.replicas.values())


def test_what_is_pulled_when_the_caches_are_emptied_is_not_found() -> None:
    pair = Pair()
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.world.send(CachesReset())
    pair.end()
    assert pair.counts == (0, 0)
    assert pair.target.num_computed >= 40


def test_whose_client_leaves_is_over_before_its_pull() -> None:
    """The blocks come all the same, for others."""
    pair = Pair()
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.world.send(AbortRequest(request_id="second"))
    assert "second" not in pair.world.core.requests
    pair.end()
    assert pair.counts == (9, 0)


def test_nobody_waits_for_ever() -> None:
    """A pull of which nothing is heard holds its blocks, but no sequence."""
    pair = Pair()
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.world.step("gpu-1")
    assert pair.world.core.waits_for_time
    pair.world.now_s += PATIENCE_S + 1
    pair.world.send()
    assert pair.running("gpu-1") == ["second"]
    assert not pair.world.core.waits_for_time
    while pair.world.executors["gpu-1"].queue:
        pair.world.step("gpu-1")
    assert len(pair.world.core.planner.pulls) == 1
    pair.end()
    assert pair.counts == (0, 0)


def test_reports_of_nothing_are_ignored() -> None:
    """Of another scheduler's pulls, of an executor before, of what was never ordered, and said twice."""
    pair = Pair()
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.world.step("gpu-1")
    report = pair.target.pulls.pull_one()
    for changed in (
        {"scheduler_epoch": 9}, {"executor_epoch": 9}, {"replica": "gpu-0"}, {"replica": "gone"}, {"pull": 5},
    ):  # fmt: skip
        pair.world.send(structs.replace(report, **changed))
    assert len(pair.world.core.planner.pulls) == 1
    pair.world.send(report, report)
    pair.end()
    assert pair.counts == (9, 0)


@pytest.mark.parametrize("kinds", [("", ""), ("alike", ""), ("alike", "other")])
def test_only_replicas_of_one_kind_lend(kinds: tuple[str, str]) -> None:
    pair = Pair()
    for name, epoch, kind in (("gpu-0", 5, kinds[0]), ("gpu-1", 6, kinds[1])):
        pair.world.kill(name)
        executor = pair.join(name, epoch, kind=kind)
        if name == "gpu-0":
            pair.world.send(request("anew", LONG, max_tokens=1))
            pair.world.run()
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.end()
    assert executor.pulls.num_done == 0


# -- draining ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, WINDOWED, {"num_drafts": 3}, {"num_host_blocks": 20}])
def test_a_replica_that_drains_gives_its_sequences_away(options: dict[str, Any]) -> None:
    """They go on in the middle, with their blocks; once these are there its executor may end. No loss is counted."""
    options = {**options, "num_blocks": 3 * options.get("num_blocks", 32)}
    pair = Pair(max_num_seqs=8, **options)
    pair.world.kill("gpu-1")
    for number in range(3):
        pair.world.send(request(f"long {number}", prompt(30, seed=number), max_tokens=40, n=1 + number % 2))
    pair.world.send(request("beams", prompt(17, seed=4), max_tokens=12, n=2, beam_width=2))
    for _ in range(9):
        pair.world.step("gpu-0")
    target = pair.join("gpu-1", 7)
    pair.world.send(ReplicaSuspended("gpu-0", drains=True))
    assert {each.why for each in pair.world.preempted[-3:]} == {MOVED}
    pair.end()
    assert list(pair.world.executors) == ["gpu-1"]
    assert pair.counts[0] > 20
    assert pair.lender.plans[-1].is_last
    assert target.num_computed < 4 * 40
    assert not pair.world.given_up


def test_one_that_drains_alone_ends_once_its_steps_have_landed() -> None:
    """Nobody could pull from it; its requests wait for the next."""
    pair = Pair()
    pair.world.kill("gpu-1")
    pair.world.send(request("second", LONG, max_tokens=30))
    pair.world.send(ReplicaSuspended("gpu-0", drains=True))
    while "gpu-0" in pair.world.executors:
        pair.world.step("gpu-0")
    assert len(pair.world.core.waiting) == 1
    pair.join("gpu-1", 8)
    pair.end()


def test_the_last_plan_pulls_nothing() -> None:
    """The target begins to drain while a pull waits for its next plan: the lender's blocks are given back."""
    pair = Pair({"pipeline_depth": 1}, max_num_seqs=2)
    for seed in range(3):
        pair.world.send(request(f"short {seed}", prompt(3, seed=seed), max_tokens=60))
    pair.world.send(request("second", LONG, max_tokens=3))
    assert len(pair.world.core.planner.pulls) == 1
    assert not pair.target.plans[-1].pulls
    pair.world.send(ReplicaSuspended("gpu-1", drains=True))
    assert len(pair.world.core.planner.pulls) == 0
    pair.end()
    assert pair.target.plans[-1].is_last
    assert not any(plan.pulls for plan in pair.target.plans)


def test_who_drains_and_cannot_lend_is_not_told_when_to_end() -> None:
    """It ends by itself, and its sequences go on elsewhere after that."""
    world = World()
    executor = world.join()
    world.send(request("a", LONG, max_tokens=30))
    world.send(ReplicaSuspended("gpu-0", drains=True))
    while executor.queue:
        world.step()
    assert not any(plan.is_last for plan in executor.plans)
    world.kill("gpu-0")
    world.join(name="gpu-1")
    world.run()
    world.check_end()


@pytest.mark.parametrize(("depth", "goes_out"), [(3, True), (2, False)])
def test_a_pull_does_not_wait_for_the_steps_in_flight(depth: int, goes_out: bool) -> None:
    """Nothing uses its blocks. If there may be one more plan, one without rows goes out beside the two in flight."""
    pair = Pair({"pipeline_depth": depth}, max_num_seqs=2, step_s=0.02)
    for seed in range(3):
        pair.world.send(request(f"short {seed}", prompt(3, seed=seed), max_tokens=60))
    for _ in range(4):
        pair.world.step("gpu-1")
    assert len(pair.target.queue) == 2
    pair.world.send(request("second", LONG, max_tokens=3))
    last = pair.target.queue[-1]
    assert (len(pair.target.queue), len(last.slots), len(last.pulls)) == ((3, 0, 1) if goes_out else (2, 1, 0))
    if goes_out:
        pair.world.pull("gpu-1")
        assert len(pair.target.queue) == 3
    pair.world.step("gpu-1")
    assert len(pair.target.queue[-1].slots) > 0
    pair.end()
    assert pair.counts == (9, 0)


@pytest.mark.parametrize("copy_lag", [0, 2])
def test_blocks_are_used_until_the_plan_behind_their_release_is_done(copy_lag: int) -> None:
    """With its copies. Before the first result nobody knows what an earlier scheduler has ordered."""
    world = World(preemption_mode="swap")
    executor = world.join(num_host_blocks=20, copy_lag=copy_lag)
    replica = world.core.replicas["gpu-0"]
    assert not replica.has_finished_with([5])
    world.send(request("a", LONG[:8], max_tokens=40))
    for _ in range(1 + copy_lag):
        world.step()
    (blocks,) = (list(sequence.blocks) for sequence in replica.slots.occupied())
    assert replica.has_finished_with([max(blocks) + 1])
    world.send(AbortRequest(request_id="a"))
    last = replica.step + 1
    while executor.queue:
        assert not replica.has_finished_with(blocks)
        world.step()
    assert replica.step_results.last_step == last
    assert replica.has_finished_with(blocks) == (not copy_lag)
