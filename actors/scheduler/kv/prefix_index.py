"""The prefix index: maps the chained hash of a full block of tokens to the block that holds it.

A block is listed once a step that computes its tokens is planned and their values are known, until the pool reallocates
it. If two sequences computed the same tokens, only the first one's block is listed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import eq

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.model.window import EVERYTHING, Window

MANY = 64
"""The number of blocks above which arrays are quicker than a loop."""

LEAST_RUNS = 64
"""Runs that are remembered before outdated ones are dropped."""

_SUFFIXES = tuple(bytes((number,)) for number in range(256))


def page_keys(block_hash: bytes, count: int) -> list[bytes]:
    """The keys of a block's pages of layers with windows, if others have none. The page of those others is listed under
    the block's hash itself."""
    return [block_hash + suffix for suffix in _SUFFIXES[:count]]


_ADAPTER = b"adapter "
"""The prefix of adapters' keys. They are longer than hashes, which have 16 bytes, or 17 for pages."""


def adapter_keys(digest: str, count: int) -> list[bytes]:
    """The keys of an adapter's blocks."""
    return [b"%s%s %d" % (_ADAPTER, digest.encode(), page) for page in range(count)]


def adapter_of(content: bytes) -> str | None:
    """The digest of the adapter that a listed block belongs to; None: it holds keys and values."""
    if len(content) <= 17 or not content.startswith(_ADAPTER):
        return None
    return content[len(_ADAPTER) :].rpartition(b" ")[0].decode()


def leading(find: Callable[[bytes], int | None], contents: Iterable[bytes]) -> list[int]:
    """The blocks of the first contents, up to one that is not found."""
    found: list[int] = []
    for content in contents:
        block = find(content)
        if block is None:
            break
        found.append(block)
    return found


def as_rows(blocks: Sequence[int]) -> NDArray[np.intp]:
    """Block numbers as an index into arrays, in a third of the time that ``np.array`` takes for a list."""
    return np.frombuffer(array("L", blocks), np.intp)


class PrefixIndex:
    """A one-to-one map between hashes and blocks.

    A full cache holds millions of entries, so the map from a block back to its hash is a list: 8 bytes per block, plus
    4 for the plan that brought its content.

    The first block of a sequence is an *anchor*. With a window, so is one of each run as long as a match. Every match
    has an anchor.
    """

    def __init__(self, window: Window = EVERYTHING) -> None:
        self._blocks: dict[bytes, int] = {}
        self._later: list[tuple[Sequence[bytes], list[int]]] = []
        """Hashes, and the blocks that hold them, that are not in the map yet."""
        self.new_anchors: list[bytes] = []
        """Hashes of anchors listed since the last reader took them."""
        self._anchor_every = window.num_matched
        self._runs: dict[bytes, list[int]] = {}
        """By first hash, the blocks of a long prefix when it was last listed or found. Most are still there; readers
        check it."""
        self._most_runs = LEAST_RUNS
        self._hashes: list[bytes | None] = []
        """By block, as far as blocks have been listed."""
        self.step = 0
        """The newest plan."""
        self._steps = array("i")
        """By block, the newest plan when it was listed; -1: it is not listed."""
        self._all_steps: NDArray[np.int32] = np.empty(0, np.int32)
        """The same memory for many blocks at a time."""

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, block: int) -> bool:
        return self.hash_of(block) is not None

    @property
    def blocks(self) -> dict[bytes, int]:
        """By hash, the block; to be read only."""
        self.settle()
        return self._blocks

    @property
    def num_runs(self) -> int:
        """How many long prefixes are remembered."""
        return len(self._runs)

    @property
    def listed(self) -> Iterable[int]:
        """The listed blocks."""
        return self.blocks.values()

    def match(self, hashes: list[bytes], limit: int) -> list[int]:
        """Blocks of the longest cached prefix, at most ``limit`` of them. Changes nothing; the blocks may be evicted
        unless they are retained before the next allocation."""
        if not (limit and hashes and self.find(hashes[0]) is not None):
            return []
        wanted = hashes[:limit]
        found = self._guess(wanted) if len(wanted) > MANY else []
        num_guessed = len(found)
        if self._later and num_guessed < len(wanted):
            if self.find(wanted[num_guessed]) is None:
                return found
            self.settle()
        with suppress(KeyError):  # what was found before the first that is not listed stays
            found.extend(map(self._blocks.__getitem__, wanted[num_guessed:] if num_guessed else wanted))
        if len(found) - num_guessed > MANY:
            self._note_run(wanted, found)
        return found

    def _guess(self, wanted: list[bytes]) -> list[int]:
        """The first blocks of :meth:`match`, as far as they are still where a prefix with the same first block was last
        seen. Checking that is several times faster than looking each hash up, which waits for memory."""
        run = self._runs.get(wanted[0], [])[: len(wanted)]
        contents = list(map(self._hashes.__getitem__, run))
        if contents != wanted[: len(run)]:
            del run[list(map(eq, contents, wanted)).index(False) :]
        return run

    def _note_run(self, contents: Sequence[bytes], blocks: list[int]) -> None:
        """Remember the blocks of a sequence's first contents."""
        if len(self._runs) >= self._most_runs:
            self._runs = {first: run for first, run in self._runs.items() if self.find(first) is not None}
            self._most_runs = max(LEAST_RUNS, 2 * len(self._runs))
        self._runs[contents[0]] = blocks.copy()

    def insert(self, block_hash: bytes, block: int, step: int | None = None) -> bool:
        """List a block; False if other content is listed for it or another block for the hash. ``step``: the plan that
        brings the content, if not the newest."""
        if self.find(block_hash) is not None or self.hash_of(block) is not None:
            return False
        if block >= len(self._hashes):
            self._reach(block)
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash
        self._steps[block] = self.step if step is None else step
        return True

    def insert_new(self, hashes: Sequence[bytes], blocks: list[int], step: int | None = None) -> None:
        """:meth:`insert` many at a time; quicker if none of the blocks is listed yet. The slowest part is left to
        :meth:`settle`. Until then, only a match of them from the first one on is as quick as later."""
        rows = as_rows(blocks)
        if not len(rows):
            return
        self._reach(int(rows.max()))
        if np.count_nonzero(self._all_steps[rows] >= 0):
            for block_hash, block in zip(hashes, blocks, strict=True):
                self.insert(block_hash, block, step)
            return
        self._all_steps[rows] = self.step if step is None else step
        first, by = blocks[0], blocks[-1] >= blocks[0] or -1
        if np.array_equal(rows, np.arange(first, first + by * len(rows), by)):
            self._hashes[min(first, blocks[-1]) : max(first, blocks[-1]) + 1] = hashes[::by]
        else:
            known = self._hashes
            for block_hash, block in zip(hashes, blocks, strict=True):
                known[block] = block_hash
        self._later.append((hashes, blocks))
        if len(blocks) > MANY:
            self._note_run(hashes, blocks)

    def settle(self) -> None:
        """Finish what :meth:`insert_new` has left. A content that was listed before keeps its other block."""
        while self._later:
            hashes, blocks = self._later.pop(0)
            if list(map(self._hashes.__getitem__, blocks)) != hashes:  # some are forgotten already
                pairs = [pair for pair in zip(hashes, blocks, strict=True) if self._hashes[pair[1]] == pair[0]]
                hashes, blocks = [content for content, _ in pairs], [block for _, block in pairs]
            found = list(map(self._blocks.setdefault, hashes, blocks))
            if found != blocks:
                for block in [block for listed, block in zip(found, blocks, strict=True) if listed != block]:
                    self._hashes[block], self._steps[block] = None, -1

    def _reach(self, block: int) -> None:
        """Make the lists long enough for this block."""
        missing = block + 1 - len(self._hashes)
        if missing > 0:
            missing = max(missing, len(self._hashes) // 8)
            self._hashes.extend([None] * missing)
            self._steps = self._steps + array("i", [-1]) * missing
            self._all_steps = np.frombuffer(self._steps, np.int32)

    def insert_all(
        self, hashes: Sequence[bytes], blocks: list[int], start: int, end: int, first_block: int = 0
    ) -> None:
        """List the blocks ``start`` to ``end`` of a sequence, as far as they have been hashed and are among its
        ``blocks``, which begin with ``first_block``."""
        start, end = max(start, first_block), min(end, len(hashes))
        self.note_anchors(hashes, start, end)
        if end - start > MANY and not first_block:
            self._note_run(hashes, blocks[:end])
        for i in range(start, end):
            self.insert(hashes[i], blocks[i - first_block])

    def note_anchors(self, hashes: Sequence[bytes], start: int, end: int) -> None:
        """Note the anchors among the blocks ``start`` to ``end`` of a sequence, which are listed in some tier."""
        self.new_anchors += self.anchors(hashes, start, end)

    def anchors(self, hashes: Sequence[bytes], start: int, end: int) -> list[bytes]:
        """The anchors among the blocks ``start`` to ``end`` of a sequence."""
        found = [hashes[0]] if start == 0 < end else []
        if every := self._anchor_every:
            found += hashes[max(-(-start // every), 1) * every : end : every]
        return found

    def insert_pages(
        self, hashes: Sequence[bytes], pages: Sequence[int], start: int, end: int, first_block: int, each: int
    ) -> None:
        """:meth:`insert_all` of ``pages``, of which a block has ``each``, under its :func:`page_keys`."""
        for i in range(max(start, first_block), min(end, len(hashes))):
            at = (i - first_block) * each
            for key, page in zip(page_keys(hashes[i], each), pages[at : at + each], strict=True):
                self.insert(key, page)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, if one is listed."""
        block = self._blocks.get(block_hash)
        if block is None and self._later:
            for hashes, blocks in self._later:
                if block_hash in hashes and self.hash_of(later := blocks[hashes.index(block_hash)]) == block_hash:
                    return later
        return block

    def hash_of(self, block: int) -> bytes | None:
        """The content listed for a block, if any is."""
        hashes = self._hashes
        return hashes[block] if block < len(hashes) else None

    def hashes_of(self, blocks: Sequence[int]) -> list[bytes | None]:
        """:meth:`hash_of` each."""
        hashes, count = self._hashes, len(self._hashes)
        return [hashes[block] if block < count else None for block in blocks]

    def are_listed(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of many blocks are listed."""
        steps = self._all_steps
        within = rows < len(steps)
        if np.count_nonzero(within) == len(rows):
            return steps[rows] >= 0
        listed: NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
        listed[within] = steps[rows[within]] >= 0
        return listed

    def newest_step(self, blocks: Sequence[int]) -> int:
        """The plan after which all these listed blocks have their contents."""
        return int(self._all_steps[as_rows(blocks)].max())

    def forget(self, blocks: Sequence[int]) -> list[tuple[int, bytes]]:
        """Remove blocks whose contents are about to change. Returns those that are listed, each with its hash."""
        contents, known, steps = self.hashes_of(blocks), self._hashes, self._steps
        if not any(contents):
            return []
        listed = [(block, content) for block, content in zip(blocks, contents, strict=True) if content is not None]
        for block, content in listed:
            known[block], steps[block] = None, -1
            if self._blocks.get(content) == block:  # or it is to be listed later
                del self._blocks[content]
        return listed

    def clear(self) -> None:
        """Remove all blocks. ``new_anchors`` stay, because the blocks may be in the host tier too."""
        self._blocks.clear()
        self._later.clear()
        self._runs.clear()
        self._hashes.clear()
        self._steps, self._all_steps = array("i"), np.empty(0, np.int32)

    def check_integrity(self, num_blocks: int) -> None:
        """Both directions agree and name only existing blocks.

        Raises:
            AssertionError: they do not.
        """
        assert len(self.blocks) == len(self._hashes) - self._hashes.count(None)
        blocks = list(self.blocks.values())
        assert not blocks or 0 <= min(blocks) <= max(blocks) < num_blocks, "a listed block does not exist"
        assert self.hashes_of(blocks) == list(self.blocks), "a block is listed under two hashes"
        listed = [content is not None for content in self._hashes]
        assert [step >= 0 for step in self._steps] == listed, "listed blocks and their plans differ"
