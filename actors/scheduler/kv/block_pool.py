"""The device blocks of one replica: their reference counts, and the order in which free ones are allocated.

Free blocks form a doubly linked list. Its links live on the blocks, with a sentinel at both ends, so a cached block
leaves the middle in O(1) when a new sequence shares it. Free blocks keep their content. Released blocks that the prefix
index lists go to the tail, so the least recently used is at the head. Others go to the head, because their content
cannot be found. :meth:`BlockPool.allocate` takes from the head and removes the block from the index.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, pairwise

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.kv.prefix_index import MANY, PrefixIndex, adapter_of, as_rows


class BlockPool:
    """``num_blocks`` >= 1 blocks with reference counts; a block is free exactly when its count is 0."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks {num_blocks}: must be at least 1")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_allocated = 0
        """Blocks allocated so far."""
        self.on_evict: Callable[[int, bytes], None] | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._index = index
        self._end = num_blocks  # the sentinel: its next is the head, its previous the tail
        self._counts = array("i", bytes(4 * num_blocks))
        self._used = array("i", bytes(4 * num_blocks))
        """By block, the last plan that may use it for its former owner."""
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._prev = array("i", [num_blocks, *range(num_blocks)])
        # The same memory as arrays, to handle many blocks at a time without a Python loop.
        self._all_counts, self._all_used, self._all_next, self._all_prev = (
            np.frombuffer(each, np.int32) for each in (self._counts, self._used, self._next, self._prev)
        )

    def tell_evictions(self, tell: Callable[[int, bytes], None] | None) -> None:
        """Call ``tell`` with a block and its listed content before the block is reallocated."""
        self.on_evict = tell

    def tell_losses(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` instead with the digest of an adapter when one of its blocks is reallocated."""
        self._on_lost = tell

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, least recently used first; their old content is forgotten.

        Raises:
            ValueError: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        following, counts, end = self._next, self._counts, self._end
        blocks = self._first(count)
        block, listed = following[blocks[-1] if blocks else end], True
        if count > MANY:
            rows = as_rows(blocks)
            self._all_counts[rows] = 1
            listed = bool(np.count_nonzero(self._index.are_listed(rows)))
        else:
            for each in blocks:
                counts[each] = 1
        following[end] = block
        self._prev[block] = end
        self.num_allocated += count
        self.num_free -= count
        for block, content in self._index.forget(blocks) if listed else ():
            self._lose(block, content)
        return blocks

    def _first(self, count: int) -> list[int]:
        """The first ``count`` free blocks. Runs of adjacent blocks, as one sequence leaves them, take no Python
        loop."""
        following = self._next
        blocks: list[int] = []
        block = following[self._end]
        while count > MANY:
            run = self._side_by_side(block, count)
            blocks += run
            block, count = following[run[-1]], count - len(run)
            if len(run) < MANY:
                break
        for _ in range(count):
            blocks.append(block)
            block = following[block]
        return blocks

    def _side_by_side(self, block: int, most: int) -> range:
        """A run of at most ``most`` free blocks from this one on, in which each block's number is one more than the one
        before, or in which each is one less."""
        by = -1 if self._next[block] < block else 1
        most = min(most, self.num_blocks - block if by > 0 else block + 1)
        span = self._all_next[block : block + most] if by > 0 else self._all_next[block - most + 1 : block + 1][::-1]
        (ends,) = (span != np.arange(block + by, block + by * (most + 1), by)).nonzero()
        return range(block, block + by * (int(ends[0]) + 1 if len(ends) else most), by)

    def _lose(self, block: int, content: bytes) -> None:
        """Report that a listed free block is reallocated."""
        if self._on_lost is not None and (digest := adapter_of(content)) is not None:
            self._on_lost(digest)
        elif self.on_evict is not None:
            self.on_evict(block, content)

    def retain(self, blocks: Sequence[int]) -> None:
        """One more owner for each block; cached free ones leave the free list with their content."""
        counts, following, prev = self._counts, self._next, self._prev
        if len(blocks) > MANY:
            at = as_rows(blocks)
            taken = at[self._all_counts[at] == 0]
            self._all_counts[at] += 1
            firsts, lasts = self._runs(taken)
            self.num_free -= len(taken)
        else:
            firsts = lasts = [block for block in blocks if not counts[block]]
            for block in blocks:
                counts[block] += 1
            self.num_free -= len(firsts)
        for first, last in zip(firsts, lasts, strict=True):
            before, after = prev[last], following[first]
            following[before], prev[after] = after, before

    def _runs(self, blocks: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """The first and last block of each run in ``blocks`` whose members precede each other in the free list, last
        block first, as a sequence releases them."""
        apart = np.ones(len(blocks) + 1, np.bool_)
        apart[1:-1] = self._all_next[blocks[1:]] != blocks[:-1]
        return blocks[apart[:-1]].tolist(), blocks[apart[1:]].tolist()

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner of each block. Blocks without owner become free in the order given: pass a sequence's last
        block first, so that it is evicted before the prefix that it depends on.

        Raises:
            ValueError: a block is free already; nothing was released.
        """
        blocks = list(blocks)
        if len(blocks) > MANY:
            self._release_many(as_rows(blocks))
            return
        counts, used, step = self._counts, self._used, self._index.step + 1
        if not all([counts[block] for block in blocks]):
            raise ValueError(f"of the blocks {blocks} one is released but nobody holds it")
        freed = []
        for block in blocks:
            counts[block] = left = counts[block] - 1
            if not left:
                used[block] = step
                freed.append(block)
        contents = self._index.hashes_of(freed)
        if not all(contents):
            empty = [block for block, content in zip(freed, contents, strict=True) if content is None]
            self._link(self._end, empty[::-1], self._next[self._end])
            freed = list(compress(freed, contents))
        self._link(self._prev[self._end], freed, self._end)

    def _release_many(self, blocks: NDArray[np.intp]) -> None:
        """:meth:`release` as array operations."""
        counts = self._all_counts[blocks]
        if np.count_nonzero(counts) < len(counts):
            raise ValueError(f"of the blocks {blocks.tolist()} one is released but nobody holds it")
        self._all_counts[blocks] = counts - 1
        freed = blocks[counts == 1]
        self._all_used[freed] = self._index.step + 1
        listed = self._index.are_listed(freed)
        if np.count_nonzero(listed) < len(listed):
            self._link_many(self._end, freed[~listed][::-1], self._next[self._end])
            freed = freed[listed]
        self._link_many(self._prev[self._end], freed, self._end)

    def _link(self, before: int, blocks: list[int], after: int) -> None:
        """Put blocks between two neighbours in the free list."""
        following, prev = self._next, self._prev
        for one, another in pairwise([before, *blocks, after]):
            following[one], prev[another] = another, one
        self.num_free += len(blocks)

    def _link_many(self, before: int, blocks: NDArray[np.intp], after: int) -> None:
        """:meth:`_link` as array operations."""
        chain = np.concatenate(((before,), blocks, (after,)))
        self._all_next[chain[:-1]], self._all_prev[chain[1:]] = chain[1:], chain[:-1]
        self.num_free += len(blocks)

    def use_next(self, block: int) -> None:
        """Note that the next plan reads a block, whoever owns it by then."""
        self._used[block] = self._index.step + 1

    def last_used(self, blocks: Sequence[int]) -> int:
        """The last plan that may use any of these blocks for a former owner."""
        return int(self._all_used[as_rows(blocks)].max())

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` would leave the free list if they were retained."""
        if len(blocks) > MANY:
            return len(blocks) - int(np.count_nonzero(self._all_counts[as_rows(blocks)]))
        counts = self._counts
        return len([block for block in blocks if not counts[block]])

    def head(self, count: int) -> list[int]:
        """The free blocks that would be taken next, at most ``count``."""
        return self._first(min(count, self.num_free))

    def free_blocks(self) -> list[int]:
        """The free list from head to tail (O(n), for tests and checks)."""
        return self.head(self.num_blocks)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """``owned`` lists each held block once per owner. Counts, free list and index agree with it.

        Raises:
            AssertionError: they do not.
        """
        expected = np.bincount(np.fromiter(owned, np.intp), minlength=self.num_blocks)
        assert len(expected) == self.num_blocks, "a held block does not exist"
        for block in np.flatnonzero(self._all_counts != expected):
            raise AssertionError(f"block {block}: count {self._counts[block]}, {expected[block]} owners")
        free = self.free_blocks()
        assert len(free) == self.num_free == np.count_nonzero(expected == 0), "free list and counts differ"
        assert len(set(free)) == len(free), "a block is in the free list twice"
        assert not self._all_counts[as_rows(free)].any(), "a held block is in the free list"
        chain = as_rows([self._end, *free, self._end])
        assert np.array_equal(self._all_next[chain[:-1]], chain[1:]), "the free list is no circle"
        for block in chain[:-1][self._all_prev[chain[1:]] != chain[:-1]]:
            raise AssertionError(f"broken link at block {block}")
        self._index.check_integrity(self.num_blocks)
