"""Finding blocks by hash."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagebus.actors.scheduler.kv.prefix_index import LEAST_RUNS, MANY, PrefixIndex


def test_match_gives_the_longest_prefix() -> None:
    """The search stops at the first hash that is not listed, and at the limit."""
    index = PrefixIndex()
    for block_hash, block in ((b"a", 5), (b"b", 2), (b"d", 7)):
        assert index.insert(block_hash, block)
    assert index.match([b"a", b"b", b"c", b"d"], 4) == [5, 2]
    assert index.match([b"a", b"b"], 1) == [5]
    assert index.match([b"x"], 1) == []


def test_a_long_prefix_is_found_wherever_its_blocks_are() -> None:
    """Where many contents were last seen is a guess only: some were forgotten since, or are in other blocks."""
    index, hashes = PrefixIndex(), [number.to_bytes(16, "little") for number in range(400)]

    def check(limit: int = 400) -> None:
        expected = []
        for content in hashes[:limit]:
            if (block := index.find(content)) is None:
                break
            expected.append(block)
        assert index.match(hashes, limit) == expected

    check()
    index.insert_all(hashes, list(range(400)), 0, 200)
    for limit in (0, 70, 150, 400):
        check(limit)
    index.insert_all(hashes, list(range(400)), 200, 400)
    check(300)
    check()
    index.forget([390])
    check()
    index.insert(hashes[390], 500)
    check()
    index.forget([100])
    index.insert(hashes[100], 390)
    index.insert(b"other", 100)
    check()
    other = [*hashes[:250], b"else"]
    assert index.match(other, 251) == index.match(hashes, 250)
    index.forget(range(400))
    check()
    index.insert_new(hashes[:300], list(range(600, 900)))
    check()
    index.clear()
    check()


@pytest.mark.parametrize("blocks", [range(100, 300), range(299, 99, -1), [*range(200, 300), *range(100, 200)]])
def test_what_is_listed_later_is_found_at_once(blocks: Sequence[int]) -> None:
    """One by one, as a prefix, and as a part of another; what was listed before, or is forgotten before, stays so."""
    index, hashes = PrefixIndex(), [number.to_bytes(16, "little") for number in range(200)]
    index.insert(hashes[150], 7)
    index.insert_new(hashes, list(blocks))
    assert index.match(hashes, 200) == list(blocks)
    assert index.match([*hashes[:70], b"else"], 71) == list(blocks[:70])
    assert [index.find(content) for content in (hashes[3], b"else")] == [blocks[3], None]
    assert not index.insert(hashes[3], 400)
    index.forget([blocks[180]])
    assert index.match(hashes, 200) == list(blocks[:180])
    index.insert(hashes[180], 500)
    index.settle()
    index.check_integrity(501)
    assert index.match(hashes, 200) == [*blocks[:150], 7, *blocks[151:180], 500, *blocks[181:]]
    assert not index.insert(b"more", blocks[151])
    assert index.insert(b"more", blocks[150])


def test_no_more_is_remembered_than_is_cached() -> None:
    """Of prefixes that are gone nothing is kept for long."""
    index = PrefixIndex()
    for turn in range(10 * LEAST_RUNS):
        hashes = [(100 * turn + number).to_bytes(16, "little") for number in range(MANY + 1)]
        index.insert_new(hashes, blocks := list(range(MANY + 1)))
        assert index.match(hashes, MANY + 1) == blocks
        index.forget(blocks)
    assert index.num_runs <= LEAST_RUNS


def test_the_first_block_of_equal_content_stays_listed() -> None:
    """A second copy, or a second hash for a block, is not listed."""
    index = PrefixIndex()
    assert index.insert(b"a", 1)
    assert not index.insert(b"a", 2)
    assert not index.insert(b"b", 1)
    assert len(index) == 1
    assert 2 not in index


def test_many_are_listed_as_one_by_one() -> None:
    """Contents that are listed, or come twice, keep their blocks, and a listed block its content."""
    index, expected = PrefixIndex(), PrefixIndex()
    pairs = [(b"a", 7), (b"b", 3), (b"c", 5), (b"a", 1), (b"d", 2), (b"x", 3)]
    for batch in ([(b"b", 9)], pairs[:5], pairs, []):
        index.insert_new([content for content, _ in batch], [block for _, block in batch])
        for content, block in batch:
            expected.insert(content, block)
        assert index.blocks == expected.blocks
        assert index.hashes_of(range(10)) == expected.hashes_of(range(10))
        index.check_integrity(10)


def test_forgetting_works_once() -> None:
    """What is forgotten is gone from both directions."""
    index = PrefixIndex()
    index.insert(b"a", 1)
    assert index.forget([0, 1]) == [(1, b"a")]
    assert index.forget([1]) == []
    assert index.match([b"a"], 1) == []
    index.check_integrity(2)


def test_integrity_finds_a_block_that_does_not_exist() -> None:
    """Every listed block is one of the pool's."""
    index = PrefixIndex()
    index.insert(b"a", 9)
    with pytest.raises(AssertionError):
        index.check_integrity(9)
