"""Pulls of groups of ranks: each rank says what became of its part, and the blocks are there with the last of them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pagebus.bus.messages import PullReport
from pagebus.bus.messages.moves import combine_reports
from tests.actors.scheduler.moves.test_pulls import LONG, Pair
from tests.actors.scheduler.world import request

RANKS = 3
REPORT = PullReport(replica="gpu-1", executor_epoch=3, scheduler_epoch=1, pull=7, there=True, ranks=RANKS)


class GroupPair(Pair):
    """Two groups, whose pulls fail every so many reports of ranks."""

    def __init__(self, fails: int = 0) -> None:
        self._fails = fails
        super().__init__()
        self.occupy()
        self.world.send(request("second", LONG, max_tokens=3))
        while self.target.queue:
            self.world.step("gpu-1")

    def join(self, name: str, epoch: int, **pulls: Any) -> Any:
        return super().join(name, epoch, ranks=RANKS, fails=self._fails, **pulls)


def test_blocks_are_there_once_all_ranks_have_said_so() -> None:
    """Until then nobody has them, and the lender keeps its own."""
    pair = GroupPair()
    core = pair.world.core
    for _ in range(RANKS - 1):
        pair.world.pull("gpu-1")
        assert pair.counts == (0, 0)
        assert core.planner.pulls.lent(core.replicas["gpu-0"])
        assert pair.running("gpu-1") == []
    pair.world.pull("gpu-1")
    assert pair.counts == (9, 0)
    assert not core.planner.pulls.lent(core.replicas["gpu-0"])
    assert pair.running("gpu-1") == ["second"]
    pair.end()


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_one_part_that_is_not_there_fails_the_pull(fails: int) -> None:
    """Once all have spoken: others might write until then. It counts as one failure of the link."""
    pair = GroupPair(fails)
    for _ in range(RANKS - 1):
        pair.world.pull("gpu-1")
        assert pair.counts == (0, 0)
        assert len(pair.world.core.planner.pulls) == 1
    pair.world.pull("gpu-1")
    assert pair.counts == (0, 9)
    assert pair.running("gpu-1") == ["second"]
    pair.end()


def test_what_a_rank_says_again_counts_once() -> None:
    """As after a restart of the bus."""
    pair = GroupPair()
    report = pair.target.pulls.pull_one()
    for _ in range(RANKS):
        pair.world.send(report)
    assert pair.counts == (0, 0)
    pair.world.pull("gpu-1")
    pair.world.pull("gpu-1")
    assert pair.counts == (9, 0)
    pair.world.send(report)
    pair.end()


@pytest.mark.parametrize("name", ["gpu-0", "gpu-1"])
@pytest.mark.parametrize("said", [1, 2])
def test_a_group_is_lost_when_some_of_the_ranks_have_spoken(name: str, said: int) -> None:
    """Nothing is left, and nobody believes what comes later."""
    pair = GroupPair()
    for _ in range(said):
        pair.world.pull("gpu-1")
    pair.world.kill(name)
    pair.join(name, 9)
    pair.end()
    assert pair.counts[0] == 0 or name == "gpu-1"


def test_what_ranks_say_together() -> None:
    """As fast as the slowest, over with the last; the error of the first that has one."""
    parts = [
        replace(REPORT, rank=rank, bytes_per_s=rate, ended_s=ended_s)
        for rank, rate, ended_s in ((2, 5.0, 1.0), (0, 3.0, 4.0), (1, 4.0, 2.0))
    ]
    told: dict[int, PullReport] = {}
    *early, last = [combine_reports(told, part) for part in parts]
    assert early == [None, None]
    assert last == replace(REPORT, ranks=1, bytes_per_s=3.0, ended_s=4.0)
    failed = [replace(part, there=part.rank == 0, error="no way" * (part.rank > 0)) for part in parts]
    told = {}
    last = [combine_reports(told, part) for part in failed][-1]
    assert last == replace(REPORT, ranks=1, there=False, error="rank 1: no way", ended_s=4.0)
    assert combine_reports({}, replace(REPORT, ranks=1)) == replace(REPORT, ranks=1)
