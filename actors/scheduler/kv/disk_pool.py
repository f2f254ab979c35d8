"""The disk tier's blocks of one replica: which contents its executor has as files.

A content is written, then stored. The least recently used one makes room for another. The scheduler's record may be
wrong: a read of a content that is not there fails, and the content is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

WRITES_PER_TRY = 64
"""After so many writes that have not failed, or as many as it holds, a disk that was full is given more."""


def name_of(content: bytes) -> str:
    """The name of a content in messages and files."""
    return content.hex()


class DiskPool:
    """At most ``num_blocks`` contents, those under way included. Callers only read ``stored``."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self._most = num_blocks
        self._successes, self._more = 0, 1
        """Writes since the room was last changed, and how much more is tried next."""
        self.stored: OrderedDict[bytes, None] = OrderedDict()
        """Least recently used first."""
        self._written: set[bytes] = set()

    def __contains__(self, content: bytes) -> bool:
        """Whether it is stored, or will be."""
        return content in self.stored or content in self._written

    @property
    def usage(self) -> float:
        """Share of the blocks in use (0 to 1)."""
        return (len(self.stored) + len(self._written)) / self.num_blocks if self.num_blocks else 0.0

    def begin(self, content: bytes, kept: Iterable[bytes]) -> list[bytes] | None:
        """Write a content that is not there. Returns the contents to delete for it, none of ``kept``; None if there is
        no room."""
        dropped = []
        if len(self.stored) + len(self._written) >= self.num_blocks:
            oldest = next(iter(self.stored), None)
            if oldest is None or oldest in kept:
                return None
            del self.stored[oldest]
            dropped.append(oldest)
        self._written.add(content)
        return dropped

    def end(self, content: bytes, *, stored: bool) -> None:
        """A write has ended. One that has failed shows how much the disk can hold now. It may be more later: so one
        block is always tried, and ever more while no write fails."""
        self._written.discard(content)
        if not stored:
            self.num_blocks = max(1, min(self.num_blocks, len(self.stored) + len(self._written)))
            self._successes, self._more = 0, 1
            return
        self.stored[content] = None
        self._successes += 1
        if self._successes >= min(WRITES_PER_TRY, self.num_blocks) and self.num_blocks < self._most:
            self.num_blocks = min(self._most, self.num_blocks + self._more)
            self._successes, self._more = 0, 2 * self._more

    def found(self, contents: Iterable[bytes]) -> list[bytes]:
        """Note contents that the executor has found. Returns those for which there is no room."""
        dropped = []
        for content in contents:
            if content in self:
                continue
            if len(self.stored) + len(self._written) < self.num_blocks:
                self.stored[content] = None
            else:
                dropped.append(content)
        return dropped

    def touch(self, content: bytes) -> None:
        """Mark a content as used."""
        self.stored.move_to_end(content)

    def forget(self, content: bytes) -> None:
        """Forget a content that is not there any more."""
        self.stored.pop(content, None)

    def clear(self) -> None:
        """Forget everything but what is being written."""
        self.stored.clear()

    def check_integrity(self) -> None:
        """There is no more than there may be, and nothing twice.

        Raises:
            AssertionError: it is not so.
        """
        assert not self.stored.keys() & self._written
        assert len(self.stored) + len(self._written) <= self.num_blocks or not self.num_blocks
