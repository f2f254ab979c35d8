"""Host tiers that replicas of one host share: what lies in any of them need not be computed, nor be kept twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pagebus.actors.model.block_hash import hash_blocks
from pagebus.actors.scheduler.events import ReplicaSuspended
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.actors.scheduler.replica.replica import Replica
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.moves.fake_pulls import FakePulls, Lenders
from tests.actors.scheduler.moves.test_pulls import Pair
from tests.actors.scheduler.world import World, prompt, request

LONG = prompt(40, seed=5)
NUM_BLOCKS, LENT = 20, 9
"""Of a device, and of ``LONG`` without its last block, which is computed in any case."""


class Neighbours:
    """Replicas with room for one sequence each, on these hosts."""

    def __init__(self, hosts: tuple[str, ...] = ("here", "here"), **options: Any) -> None:
        self.world = World(preemption_mode="swap")
        self.lenders: Lenders = {}
        self.options: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 1, "copy_tokens": 0.1}
        self.options |= {"num_host_blocks": 60} | options
        for number, host in enumerate(hosts):
            self.join(f"gpu-{number}", number + 2, host)
        self.num_requests = 0

    def join(self, name: str, epoch: int, host: str = "here") -> FakeExecutor:
        pulls = FakePulls(kind="alike", lenders=self.lenders, host=host)
        return self.world.join(name=name, epoch=epoch, pulls=pulls, **self.options)

    def replica(self, number: int) -> Replica:
        return self.world.core.replicas[f"gpu-{number}"]

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Meanwhile no other replica takes sequences."""
        replicas = self.world.core.replicas
        others = [each for name, each in replicas.items() if name != f"gpu-{number}"]
        for each in others:
            each.is_open = lambda *_: False  # type: ignore[method-assign]
        self.world.core.planner.touch_all()
        yield
        for each in others:
            del each.is_open
        self.world.core.planner.touch_all()

    def run(self, number: int, tokens: list[int], max_tokens: int = 1) -> int:
        """A request on this replica. Returns the tokens that were computed for it."""
        executor = self.world.executors[f"gpu-{number}"]
        before = executor.num_computed
        with self.only(number):
            self.num_requests += 1
            self.world.send(request(f"r{self.num_requests}", tokens, max_tokens=max_tokens))
            self.world.run()
        return executor.num_computed - before

    def displace(self, number: int, count: int = 2 * NUM_BLOCKS) -> None:
        """Other prompts take so many blocks of a replica's device."""
        while count > 0:
            others = np.random.default_rng(self.num_requests).integers(40, size=4 * min(count, 18) - 1)
            self.run(number, others.tolist())
            count -= 18

    def has_ordered(self, number: int) -> bool:
        """Whether a plan for this replica had a pull out of a host tier."""
        return any(each.hosts for plan in self.world.executors[f"gpu-{number}"].plans for each in plan.pulls)

    def end(self) -> None:
        self.world.run()
        self.world.check_end()

    def num_kept(self, tokens: list[int] = LONG) -> list[int]:
        """How many blocks of a prompt are in the host tier of each replica."""
        wanted = hash_blocks(np.array(tokens, np.int32), 4)
        replicas = self.world.core.replicas.values()
        return [sum(each.host_tier.pool.index.find(content) is not None for content in wanted) for each in replicas]


def test_what_lies_in_a_neighbours_host_tier_is_pulled() -> None:
    """All but the last block is computed by one replica, displaced by others, and used by the other replica."""
    pair = Neighbours()
    pair.run(0, LONG)
    pair.displace(0)
    assert pair.num_kept()[0] >= LENT
    assert pair.run(1, LONG) == len(LONG) - 4 * LENT
    moves = pair.replica(1).moves
    assert (moves.num_pulled, moves.num_pulled_hosts, moves.num_pulled_tokens) == (LENT, LENT, 4 * LENT)
    assert pair.replica(0).moves.num_lent == LENT
    pair.end()


@pytest.mark.parametrize("hosts", [("", ""), ("here", ""), ("", "here")])
def test_a_host_tier_that_nobody_can_read_is_its_replicas_own(hosts: tuple[str, str]) -> None:
    """Only what it says of itself counts."""
    pair = Neighbours(hosts)
    pair.run(0, LONG)
    pair.displace(0)
    assert pair.run(1, LONG) == (len(LONG) if not hosts[0] else len(LONG) - 4 * LENT)
    pair.end()


def test_nothing_is_kept_twice() -> None:
    """Both devices have the prompt and give it away: one host tier keeps it."""
    pair = Neighbours()
    pair.run(0, LONG)
    assert pair.run(1, LONG) < len(LONG)
    for number in (0, 1):
        pair.displace(number)
    assert sum(pair.num_kept()) == LENT + 1
    assert min(pair.num_kept()) == 0
    pair.end()


def test_what_was_preempted_is_not_kept_twice_for_long() -> None:
    """Its blocks are copied whole. Once the sequence is over those that a neighbour has, too, are the first to go."""
    pair = Neighbours()
    pair.run(1, LONG)
    pair.displace(1)
    pair.displace(0)
    with pair.only(0):
        pair.world.send(request("swapped", LONG, max_tokens=30))
        while not any(heard.tokens for heard in pair.world.heard.values() if heard.started.request_id == "swapped"):
            pair.world.pull("gpu-0") if pair.world.executors["gpu-0"].pulls.orders else pair.world.step("gpu-0")
        (sequence,) = pair.replica(0).slots.occupied()
        preempt(pair.replica(0), sequence)
        pair.world.core.planner.requeue(pair.replica(0))
        assert min(pair.num_kept()) >= LENT
        pair.world.run()
    pool, wanted = pair.replica(0).host_tier.pool, hash_blocks(np.array(LONG, np.int32), 4)
    assert {pool.index.hash_of(block) for block in list(pool.cached)[:LENT]} <= set(wanted)
    pair.end()


@pytest.mark.parametrize("number", [0, 1])
def test_a_prefix_may_lie_in_both(number: int) -> None:
    """Each replica has given away a part of it, tail first, that the other still had on its device."""
    pair = Neighbours()
    pair.run(0, LONG)
    pair.run(1, LONG)
    while pair.num_kept()[0] < 3:
        pair.displace(0, 2)
    for each in (1, 0):
        pair.displace(each)
    assert min(pair.num_kept()) > 0
    assert sum(pair.num_kept()) == LENT + 1
    assert pair.run(number, LONG) == len(LONG) - 4 * LENT
    lent = pair.replica(1 - number).moves.num_lent - (LENT if number else 0)
    assert 0 < lent < pair.replica(number).moves.num_pulled_hosts == LENT
    pair.end()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["ordered", "running"])
def test_a_replica_dies_under_a_pull_from_a_host_tier(victim: int, phase: str) -> None:
    """Pools are whole at once; what the lender had is computed."""
    pair = Neighbours()
    pair.run(0, LONG)
    pair.displace(0)
    with pair.only(1):
        pair.world.send(request("second", LONG, max_tokens=3))
        if phase == "running":
            pair.world.step("gpu-1")
        assert [*pair.world.core.planner.pulls.owned_hosts(pair.replica(0))]
    pair.world.kill(f"gpu-{victim}")
    pair.end()


@pytest.mark.parametrize("copy_lag", [0, 2])
def test_a_pull_waits_until_the_host_tier_has_its_blocks(copy_lag: int) -> None:
    """They can be found as soon as the plan is made that copies them out. An idle lender is asked for a result that
    says that they are there."""
    pair = Neighbours(copy_lag=copy_lag)
    pair.run(0, LONG)
    with pair.only(0):
        others = np.random.default_rng(1).integers(40, size=4 * 18 - 1).tolist()
        pair.world.send(request("others", others, max_tokens=1))
    assert pair.num_kept()[0] >= LENT - 1
    with pair.only(1):
        pair.world.send(request("second", LONG, max_tokens=2))
        assert len(pair.world.core.planner.pulls) > 0
        assert not pair.has_ordered(1)
        pair.world.step("gpu-0")
        assert pair.has_ordered(1) == (not copy_lag)
        pair.world.run()
    moves = pair.replica(1).moves
    assert 0 < moves.num_pulled_hosts <= moves.num_pulled == LENT
    pair.end()


def test_a_pull_waits_until_its_lender_has_loaded_its_blocks() -> None:
    """They can be found on its device as soon as the plan that loads them is made."""
    pair = Pair({"preemption_mode": "swap"}, num_host_blocks=60)
    pair.world.kill("gpu-1")
    for seed in (6, 7, 8):
        pair.world.send(request(f"filler {seed}", prompt(60, seed=seed), max_tokens=1))
        pair.world.run()
    target = pair.join("gpu-1", 4)
    pair.world.send(request("again", LONG, max_tokens=30))
    assert pair.running("gpu-0") == ["again"]
    assert len(pair.lender.queue[0].swap_in_blocks)
    pair.world.send(request("second", LONG, max_tokens=3))
    assert not any(plan.pulls for plan in target.plans)
    pair.end()
    assert pair.counts == (9, 0)


def test_what_is_pulled_out_of_a_host_tier_stays_there_until_then() -> None:
    """Although the lender displaces everything else that its host tier has."""
    pair = Neighbours(num_host_blocks=20)
    pair.run(0, LONG)
    pair.displace(0, 24)
    assert pair.num_kept()[0] >= LENT
    with pair.only(1):
        pair.world.send(request("second", LONG, max_tokens=2))
        pair.world.step("gpu-1")
    (order,) = pair.world.executors["gpu-1"].pulls.orders
    assert order.hosts
    with pair.only(0):
        for seed in range(6):
            others = np.random.default_rng(100 + seed).integers(40, size=4 * 18 - 1).tolist()
            pair.world.send(request(f"others {seed}", others, max_tokens=1))
            while pair.world.executors["gpu-0"].queue:
                pair.world.step("gpu-0")
    assert pair.num_kept()[0] == LENT
    pair.end()
    assert pair.replica(1).moves.num_pulled_hosts == LENT


def test_a_part_whose_owner_dies_is_gone() -> None:
    """The other replica computes it, and keeps it itself from then on."""
    pair = Neighbours()
    pair.run(0, LONG)
    pair.displace(0)
    pair.world.kill("gpu-0")
    pair.join("gpu-0", 9)
    assert pair.run(1, LONG) == len(LONG)
    pair.displace(1)
    assert pair.num_kept()[0] >= LENT
    pair.end()


def test_who_drains_lends_its_host_tier_first() -> None:
    """It ends once nobody wants its blocks, those in host memory included."""
    pair = Neighbours()
    pair.run(0, LONG)
    pair.displace(0)
    with pair.only(1):
        pair.world.send(request("second", LONG, max_tokens=2))
        pair.world.send(ReplicaSuspended("gpu-0", drains=True))
    pair.world.run()
    assert "gpu-0" not in pair.world.executors
    assert pair.replica(1).moves.num_pulled_hosts == LENT
    pair.end()


def test_a_slow_neighbour_is_left_alone() -> None:
    """At first it seems as fast as the own host tier; one pull tells."""
    pair = Neighbours(copy_tokens=3.0, num_host_blocks=200)
    pair.world.executors["gpu-1"].pulls.bytes_per_s = 10.0
    for seed in (6, 7):
        pair.run(0, prompt(40, seed=seed))
    pair.displace(0)
    computed = [pair.run(1, prompt(40, seed=seed)) for seed in (6, 7)]
    assert computed == [4, 40]
    pair.displace(1)
    assert min(pair.num_kept(prompt(40, seed=7))) >= LENT
    pair.end()


@pytest.mark.parametrize("drains", [False, True])
def test_a_swapped_sequence_goes_on_with_a_neighbour(drains: bool) -> None:
    """Its replica has no slot for it, or drains. The other has one, and pulls its blocks out of the host tier."""
    pair = Neighbours()
    with pair.only(0):
        pair.world.send(request("swapped", LONG, max_tokens=30))
        while not any(heard.tokens for heard in pair.world.heard.values()):
            pair.world.step("gpu-0")
        replica = pair.replica(0)
        (sequence,) = replica.slots.occupied()
        preempt(replica, sequence)
        pair.world.core.planner.requeue(replica)
        replica.index.clear()  # as if others had taken these blocks
    with pair.only(1):
        if drains:
            pair.world.send(ReplicaSuspended("gpu-0", drains=True))
        pair.world.run()
    assert ("gpu-0" in pair.world.executors) == (not drains)
    assert pair.world.core.replicas["gpu-1"].moves.num_pulled_hosts >= LENT
    pair.end()


def test_a_swapped_sequence_with_a_part_of_a_block_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own replica has all its blocks. That the last of them is not full is no reason to wait for a pull, though
    another replica has more of its prompt."""
    pair = Neighbours(budget=9)
    world, replica = pair.world, pair.replica(0)
    with pair.only(0):
        world.send(request("swapped", LONG, max_tokens=8))
    with pair.only(1), monkeypatch.context() as patch:
        patch.setattr(Pulls, "can_lend", lambda *_, **__: False)
        world.send(request("other", LONG, max_tokens=1))
        while "other" not in world.over:
            world.step("gpu-1")
    with pair.only(0):
        (sequence,) = replica.slots.occupied()
        preempt(replica, sequence)
        replica.index.clear()  # as if others had taken its blocks
        world.core.planner.requeue(replica)
        assert sequence.swapped is not None
        assert sequence.swapped.num_tokens % 4
        pair.end()
