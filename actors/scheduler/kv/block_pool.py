"""The device blocks of one replica: their reference counts, and the order in which free ones are allocated.

Free blocks form a doubly linked list. Its links live on the blocks, with a sentinel at both ends, so a cached block
leaves the middle in O(1) when a new sequence shares it. Free blocks keep their content. Released blocks that the prefix
index lists go to the tail, so the least recently used is at the head. Others go to the head, because their content
cannot be found. :meth:`BlockPool.allocate` takes from the head and removes the block from the index.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex, adapter_of


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
        """Called with a block and its listed content before the block is reallocated."""
        self.on_lost: Callable[[str], None] | None = None
        """Called with the digest of an adapter, in place of the above, when one of its blocks is reallocated."""
        self._index = index
        self._counts = array("i", bytes(4 * num_blocks))
        self._used = array("i", bytes(4 * num_blocks))
        """By block, the last plan that may use it for whom it had before."""
        self._end = num_blocks  # the sentinel: its next is the head, its previous the tail
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._prev = array("i", [num_blocks, *range(num_blocks)])

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, least recently used first; their old content is forgotten.

        Raises:
            ValueError: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        following, counts, forget, end = self._next, self._counts, self._index.forget, self._end
        blocks = []
        block = following[end]
        for _ in range(count):
            blocks.append(block)
            counts[block] = 1
            content = forget(block)
            if content is not None:
                self._lose(block, content)
            block = following[block]
        self.num_allocated += count
        following[end] = block
        self._prev[block] = end
        self.num_free -= count
        return blocks

    def _lose(self, block: int, content: bytes) -> None:
        """Tell whom it concerns that a free block is given away."""
        if self.on_lost is not None and (digest := adapter_of(content)) is not None:
            self.on_lost(digest)
        elif self.on_evict is not None:
            self.on_evict(block, content)

    def retain(self, blocks: Iterable[int]) -> None:
        """One more owner for each block; cached free ones leave the free list with their content."""
        counts, following, prev = self._counts, self._next, self._prev
        num_taken = 0
        for block in blocks:
            count = counts[block]
            if count == 0:
                before, after = prev[block], following[block]
                following[before], prev[after] = after, before
                num_taken += 1
            counts[block] = count + 1
        self.num_free -= num_taken

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner of each block. Blocks without owner become free in the order given: pass a sequence's last
        block first, so that it is evicted before the prefix that it depends on.

        Raises:
            ValueError: a block is free already.
        """
        counts, used, next_step = self._counts, self._used, self._index.step + 1
        freed: list[int] = []
        for block in blocks:
            left = counts[block] - 1
            if left < 0:
                self._link(freed)
                raise ValueError(f"block {block} is released but nobody holds it")
            counts[block] = left
            if left == 0:
                used[block] = next_step
                freed.append(block)
        self._link(freed)

    def _link(self, freed: list[int]) -> None:
        """Add blocks to the free list: those listed at its tail, the others at its head."""
        following, prev, end = self._next, self._prev, self._end
        head, tail = following[end], prev[end]
        for block, block_hash in zip(freed, self._index.hashes_of(freed), strict=True):
            if block_hash is None:
                following[block], prev[head] = head, block
                head, tail = block, block if tail == end else tail
            else:
                following[tail], prev[block] = block, tail
                tail, head = block, block if head == end else head
        following[end], prev[head] = head, end
        following[tail], prev[end] = end, tail
        self.num_free += len(freed)

    def use_next(self, block: int) -> None:
        """The next plan reads a block, whoever has it by then."""
        self._used[block] = self._index.step + 1

    def last_used(self, blocks: Iterable[int]) -> int:
        """The last plan that may use any of these blocks for whom they had before."""
        return max(map(self._used.__getitem__, blocks))

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` would leave the free list if they were retained."""
        return list(map(self._counts.__getitem__, blocks)).count(0)

    def head(self, count: int) -> list[int]:
        """The free blocks that would be taken next, at most ``count``."""
        blocks: list[int] = []
        block = self._next[self._end]
        while block != self._end and len(blocks) < count:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def free_blocks(self) -> list[int]:
        """The free list from head to tail (O(n), for tests and checks)."""
        return self.head(self.num_blocks)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """``owned`` lists each held block once per owner. Counts, free list and index agree with it.

        Raises:
            AssertionError: they do not.
        """
        expected = Counter(owned)
        for block, count in enumerate(self._counts):
            assert count == expected[block], f"block {block}: count {count}, {expected[block]} owners"
        free = self.free_blocks()
        assert len(free) == self.num_free == self.num_blocks - len(+expected), "free list and counts differ"
        assert len(set(free)) == len(free), "a block is in the free list twice"
        assert all(self._counts[block] == 0 for block in free), "a held block is in the free list"
        block = self._end
        for _ in range(len(free) + 1):
            assert self._prev[self._next[block]] == block, f"broken link at block {block}"
            block = self._next[block]
        self._index.check_integrity(self.num_blocks)
