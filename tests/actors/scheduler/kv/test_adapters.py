"""Adapters of a replica of several ranks: known when all have them, and on none if one cannot read its part."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.adapters import Adapters
from pagebus.actors.scheduler.kv.block_pool import BlockPool
from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex
from pagebus.bus.messages import AdapterRead, AdapterSource


def source(digest: str) -> AdapterSource:
    return AdapterSource(name=digest, path=f"/{digest}", digest=digest)


def read(digest: str, step: int, rank: int, error: str = "", num_blocks: int = 0) -> AdapterRead:
    return AdapterRead(
        replica="executor-0", executor_epoch=1, scheduler_epoch=1, step=step, digest=digest, error=error, rank=rank,
        num_blocks=num_blocks,
    )  # fmt: skip


def adapters_of(capacity: int, ranks: int) -> Adapters:
    index = PrefixIndex()
    return Adapters(capacity, BlockPool(8, index), index, ranks=ranks)


def wanted(adapters: Adapters, digest: str, step: int) -> None:
    """Plan ``step`` has it read."""
    assert adapters.want(source(digest))
    adapters.planned(step)


def test_all_ranks_have_to_have_it() -> None:
    """In any order; what a rank says twice counts once, and what an earlier plan wanted does not count. It gets as many
    blocks as the rank with the most needs."""
    adapters = adapters_of(1, ranks=3)
    wanted(adapters, "a", 4)
    for told in (read("a", 4, 2), read("a", 4, 0), read("a", 4, 0), read("a", 3, 1), read("b", 4, 1)):
        assert adapters.take(told) == ""
        assert not adapters.is_known("a")
        assert adapters.is_read("a")
    assert adapters.take(read("a", 4, 1, num_blocks=3)) == ""
    assert adapters.is_known("a")
    assert adapters.num_blocks("a") == 3
    assert adapters.dropped == []


def test_one_rank_cannot_read_it() -> None:
    """The error is told once all ranks have spoken, with the rank's number, and the others drop it: then its place is
    free for the next plan, which may want the same again."""
    adapters = adapters_of(1, ranks=2)
    wanted(adapters, "a", 4)
    assert adapters.take(read("a", 4, 1, "no such folder")) == ""
    assert not adapters.want(source("b")), "rank 0 may still be reading"
    assert adapters.take(read("a", 4, 0)) == "rank 1: no such folder"
    assert not adapters.is_known("a")
    assert not adapters.is_read("a")
    assert adapters.want(source("a"))
    assert (adapters.dropped, [each.digest for each in adapters.loaded]) == (["a"], ["a"])
    adapters.check_integrity(())


def test_no_rank_can_read_it() -> None:
    """That of rank 0 is told as that of an executor of one rank, and there is nothing to drop."""
    adapters = adapters_of(2, ranks=2)
    wanted(adapters, "a", 4)
    assert adapters.take(read("a", 4, 1, "no such folder")) == ""
    assert adapters.take(read("a", 4, 0, "no such folder here")) == "no such folder here"
    assert adapters.dropped == []


def test_who_waits_in_front_keeps_what_was_read() -> None:
    """An adapter of a sequence in front is not dropped for one behind."""
    adapters = adapters_of(1, ranks=1)
    wanted(adapters, "a", 4)
    assert adapters.take(read("a", 4, 0)) == ""
    assert not adapters.want(source("b"), {"a"})
    assert adapters.want(source("b"), {"b"})
    assert adapters.dropped == ["a"]
