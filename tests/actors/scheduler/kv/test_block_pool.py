"""Blocks: who holds them, and in which order free ones are taken."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from pagebus.actors.scheduler.kv.block_pool import BlockPool
from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex


def make(num_blocks: int = 4) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex()
    return BlockPool(num_blocks, index), index


def test_a_new_pool_gives_its_blocks_in_order() -> None:
    """Blocks come from the head of the list until it is drained."""
    pool, _ = make()
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) == [3]
    assert pool.num_free == 0
    pool.check_integrity(range(4))


@pytest.mark.parametrize("seed", range(8))
def test_many_blocks_are_taken_in_the_order_of_single_ones(seed: int) -> None:
    """Runs of neighbours, upwards and downwards, up to both ends of the pool, and single blocks between them."""
    rng, taken = random.Random(seed), list[list[int]]()
    one, many = make(1000)[0], make(1000)[0]
    for _ in range(40):
        count = rng.randrange(1, 500)
        if count <= one.num_free:
            taken.append([one.allocate(1)[0] for _ in range(count)])
            assert many.head(count) == taken[-1]
            assert many.allocate(count) == taken[-1]
        if taken and rng.random() < 0.6:
            blocks = taken.pop(rng.randrange(len(taken)))
            blocks = blocks[::-1] if rng.random() < 0.5 else rng.sample(blocks, len(blocks))
            for pool in (one, many):
                pool.release(blocks)
    assert many.free_blocks() == one.free_blocks()
    many.check_integrity(block for blocks in taken for block in blocks)


def test_more_blocks_than_are_free_is_an_error_and_takes_none() -> None:
    """A failed allocation changes nothing."""
    pool, _ = make()
    pool.allocate(3)
    with pytest.raises(ValueError, match="1 are free"):
        pool.allocate(2)
    pool.check_integrity(range(3))


def test_cached_blocks_are_evicted_last_and_leaf_first() -> None:
    """Unlisted blocks go first; of a listed sequence, the last block goes before the prefix it depends on."""
    pool, index = make()
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        index.insert(bytes([block]), block)
    pool.release(reversed(blocks))
    assert pool.free_blocks() == [3, 2, 1, 0]
    pool.check_integrity([])


def test_allocation_forgets_what_a_block_held() -> None:
    """Once a block is somebody's own, nobody finds its old content."""
    pool, index = make(1)
    index.insert(b"a", pool.allocate(1)[0])
    pool.release([0])
    assert index.match([b"a"], 1) == [0]
    pool.allocate(1)
    assert index.match([b"a"], 1) == []


def test_a_shared_block_is_taken_out_of_the_middle_of_the_list() -> None:
    """Retaining a free cached block keeps it from eviction; the others stay in order."""
    pool, index = make()
    blocks = pool.allocate(4)
    for block in blocks:
        index.insert(bytes([block]), block)
    pool.release(blocks)
    assert pool.num_unheld([1, 2]) == 2
    pool.retain([1])
    pool.retain([1])
    assert pool.free_blocks() == [0, 2, 3]
    pool.release([1])
    pool.check_integrity([1])
    pool.release([1])
    assert pool.free_blocks() == [0, 2, 3, 1]


def test_releasing_what_nobody_holds_is_an_error() -> None:
    """Misuse is loud."""
    pool, _ = make()
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release([2])


def test_a_pool_needs_a_block() -> None:
    """An empty pool could run nothing."""
    with pytest.raises(ValueError, match="at least 1"):
        make(0)


def test_integrity_finds_a_lost_block() -> None:
    """A block that is held but belongs to nobody is a leak."""
    pool, _ = make()
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check_integrity([0])


def test_the_memory_of_a_full_cache_is_bounded() -> None:
    """An empty block takes 18 bytes at most; a listed one 220, however often its content has changed."""
    num_blocks = 20_000
    tracemalloc.start()
    pool, index = make(num_blocks)
    empty, _ = tracemalloc.get_traced_memory()
    full = []
    for generation in range(4):
        blocks = pool.allocate(num_blocks)
        for block in blocks:
            index.insert(b"%08d%08d" % (generation, block), block)
        pool.release(blocks)
        del blocks
        full.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert empty < 18 * num_blocks
    assert max(full) < 220 * num_blocks


def test_a_block_may_be_used_by_the_plan_after_its_release() -> None:
    """It was in the newest one, and the next may still copy it."""
    pool, index = make(4)
    blocks = pool.allocate(3)
    assert pool.last_used(blocks) == 0
    index.step = 7
    pool.release(blocks[:1])
    assert pool.last_used(blocks) == 8
    index.step = 9
    pool.use_next(blocks[1])
    assert [pool.last_used([block]) for block in blocks] == [8, 10, 0]


@pytest.mark.parametrize(
    ("array", "block", "number", "told"),
    [
        ("_counts", 1, 2, "block 1: count 2, 1 owners"),
        ("_counts", 5, 1, "block 5: count 1, 0 owners"),
        ("_next", 6, 5, "a block is in the free list twice"),
        ("_next", 7, 4, "the free list is no circle"),
        ("_prev", 6, 4, "broken link at block 5"),
    ],
)
def test_damage_is_told(array: str, block: int, number: int, told: str) -> None:
    """Of counts, and of links in either direction."""
    pool, _ = make(8)
    pool.allocate(4)
    getattr(pool, array)[block] = number
    with pytest.raises(AssertionError, match=told):
        pool.check_integrity(range(4))
