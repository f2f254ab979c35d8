"""Adapters of a replica of several ranks: ready when all have them, and on none if one cannot read its part."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.adapters import Adapters
from pagebus.bus.messages import AdapterRead, AdapterSource


def source(digest: str) -> AdapterSource:
    return AdapterSource(name=digest, path=f"/{digest}", digest=digest)


def read(digest: str, step: int, rank: int, error: str = "") -> AdapterRead:
    return AdapterRead(
        replica="executor-0", executor_epoch=1, scheduler_epoch=1, step=step, digest=digest, error=error, rank=rank
    )


def wanted(adapters: Adapters, digest: str, step: int) -> None:
    """Plan ``step`` has it read."""
    assert adapters.want(source(digest), ())
    adapters.planned(step)


def test_all_ranks_have_to_have_it() -> None:
    """In any order; what a rank says twice counts once, and what an earlier plan wanted does not count."""
    adapters = Adapters(1, ranks=3)
    wanted(adapters, "a", 4)
    for told in (read("a", 4, 2), read("a", 4, 0), read("a", 4, 0), read("a", 3, 1), read("b", 4, 1)):
        assert adapters.take(told) == ""
        assert not adapters.is_ready("a")
        assert adapters.is_read("a")
    assert adapters.take(read("a", 4, 1)) == ""
    assert adapters.is_ready("a")
    assert adapters.dropped == []


def test_one_rank_cannot_read_it() -> None:
    """The error is told once all ranks have spoken, with the rank's number, and the others drop it: then its place is
    free for the next plan, which may want the same again."""
    adapters = Adapters(1, ranks=2)
    wanted(adapters, "a", 4)
    assert adapters.take(read("a", 4, 1, "no such folder")) == ""
    assert not adapters.want(source("b"), ()), "rank 0 may still be reading"
    assert adapters.take(read("a", 4, 0)) == "rank 1: no such folder"
    assert not adapters.is_ready("a")
    assert not adapters.is_read("a")
    assert adapters.want(source("a"), ())
    assert (adapters.dropped, [each.digest for each in adapters.loaded]) == (["a"], ["a"])
    adapters.check_integrity(())


def test_no_rank_can_read_it() -> None:
    """That of rank 0 is told as that of an executor of one rank, and there is nothing to drop."""
    adapters = Adapters(2, ranks=2)
    wanted(adapters, "a", 4)
    assert adapters.take(read("a", 4, 1, "no such folder")) == ""
    assert adapters.take(read("a", 4, 0, "no such folder here")) == "no such folder here"
    assert adapters.dropped == []
