"""The host tier's blocks of one replica: host memory that holds copies of device blocks.

It holds two kinds of content. Blocks of preempted sequences are owned until the sequence is back on the device. Cached
blocks that were evicted from the device tier have no owner; the least recently used one is dropped when another block
is needed. Blocks listed in ``index`` are found by prefix lookup, owned or not. Plans copy in order, so a block may get
another owner as soon as the plan that reads it has been built.

Nothing is preallocated: a tier of millions of blocks costs only as much memory as is used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex


class HostPool:
    """``num_blocks`` >= 0 blocks with reference counts; the number may grow."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._num_used = 0
        """Blocks from this one on have never been used."""
        self._empty: list[int] = []
        """Free blocks without listed content."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free and listed blocks, least recently used first."""
        self._counts: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without owner, including cached ones."""
        return self.num_blocks - len(self._counts)

    @property
    def cached(self) -> Iterable[int]:
        """Listed blocks without owner."""
        return self._cached

    @property
    def usage(self) -> float:
        """Share of the blocks that have content (0 to 1)."""
        used = len(self._counts) + len(self._cached)
        return used / self.num_blocks if self.num_blocks else 0.0

    def grow(self, num_blocks: int) -> None:
        """Set the number of blocks, unless it is smaller than now."""
        self.num_blocks = max(self.num_blocks, num_blocks)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks: empty ones, then cached ones, least recently used first, which are forgotten.

        Raises:
            ValueError: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} host blocks asked for, {self.num_free} are free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        elif self._num_used < self.num_blocks:
            block = self._num_used
            self._num_used += 1
        else:
            block, _ = self._cached.popitem(last=False)
            self.index.forget((block,))
        self._counts[block] = 1
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        """One more owner for each block, which is held or cached."""
        for block in blocks:
            count = self._counts.get(block, 0)
            if not count:
                del self._cached[block]
            self._counts[block] = count + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner of each block. Listed blocks without owner stay cached, as the most recently used.

        Raises:
            ValueError: the block has no owner.
        """
        for block in blocks:
            count = self._counts.get(block, 0)
            if not count:
                raise ValueError(f"host block {block} is released but nobody holds it")
            if count > 1:
                self._counts[block] = count - 1
                continue
            del self._counts[block]
            if block in self.index:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def touch(self, block: int) -> None:
        """Mark a listed block as used: if only cached, it is now the most recently used."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def expend(self, block: int) -> None:
        """Let a listed block be dropped next, if it is only cached: its content is also elsewhere."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def forget_cached(self) -> None:
        """Empty the index; blocks without owner become empty."""
        self._empty += self._cached
        self._cached.clear()
        self.index.clear()

    def check_integrity(self, owned: Iterable[int]) -> None:
        """``owned`` lists each held block once per owner. Counts, free blocks and index agree with it.

        Raises:
            AssertionError: they do not.
        """
        assert self._counts == dict(Counter(owned)), "host blocks: counts and owners differ"
        places = [*self._counts, *self._empty, *self._cached]
        assert sorted(places) == list(range(self._num_used)), "a host block is nowhere, or in two places"
        assert self._num_used <= self.num_blocks
        assert all(self.index.hashes_of([*self._cached])), "a cached host block is not listed"
        assert not any(self.index.hashes_of(self._empty)), "an empty host block is listed"
        self.index.check_integrity(self.num_blocks)
