"""The host tier's blocks: owners, cached content, growth."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.kv.host_pool import HostPool


def listed(pool: HostPool, *names: bytes) -> list[int]:
    """Cached blocks with these contents, the first least recently used."""
    blocks = pool.allocate(len(names))
    for name, block in zip(names, blocks, strict=True):
        pool.index.insert(name, block)
    pool.release(blocks)
    return blocks


def test_empty_blocks_are_taken_before_cached_ones() -> None:
    """Content lives as long as there is room beside it."""
    pool = HostPool(4)
    a, b = listed(pool, b"a", b"b")

    (empty,) = pool.allocate(1)
    pool.release((empty,))
    taken = pool.allocate(2)

    assert not {a, b} & set(taken)
    assert pool.num_free == 2
    pool.check_integrity(taken)


def test_the_least_recently_used_content_goes_first() -> None:
    """Being retained, or touched, counts as use."""
    pool = HostPool(3)
    a, b, c = listed(pool, b"a", b"b", b"c")
    pool.touch(a)
    pool.retain((b,))
    pool.release((b,))

    taken = pool.allocate(2)

    assert taken == [c, a]
    assert pool.index.find(b"b") == b
    assert pool.index.find(b"a") is None
    pool.check_integrity(taken)


def test_held_content_stays_and_is_found() -> None:
    """What a sequence holds cannot be evicted; with its last owner gone it is cached."""
    pool = HostPool(2)
    (a,) = pool.allocate(1)
    pool.index.insert(b"a", a)
    pool.retain((a,))
    pool.release((a,))
    (other,) = pool.allocate(1)
    with pytest.raises(ValueError, match="1 host blocks asked for, 0 are free"):
        pool.allocate(1)
    pool.release((a, other))

    assert pool.index.match([b"a"], 1) == [a]
    assert pool.usage == 0.5
    pool.check_integrity(())


def test_it_grows() -> None:
    """More blocks may come, never fewer."""
    pool = HostPool(0)
    assert pool.usage == 0.0
    with pytest.raises(ValueError, match="asked for"):
        pool.allocate(1)
    pool.grow(2)
    pool.grow(1)

    assert sorted(pool.allocate(2)) == [0, 1]


def test_misuse_is_loud() -> None:
    """A block that nobody holds cannot be released, and leaks are found."""
    pool = HostPool(2)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release((0,))
    pool.allocate(1)
    with pytest.raises(AssertionError, match="owners differ"):
        pool.check_integrity(())
