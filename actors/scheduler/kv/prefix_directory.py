"""The prefix directory: finds replicas that may have cached the beginning of a prompt, by its first block.

A superset suffices, because a lookup asks each replica and drops those that have forgotten the block. Entries that are
never looked up are swept when the directory has doubled since the last sweep. So each entry costs little, and the size
stays in proportion to what is cached.
"""

from __future__ import annotations

from collections.abc import Callable

LEAST_SWEPT = 2**16


class PrefixDirectory:
    """Names of replicas by the hash of a first block."""

    def __init__(self) -> None:
        self._names: dict[bytes, set[str]] = {}
        self._most = LEAST_SWEPT

    def __len__(self) -> int:
        return len(self._names)

    def add(self, block_hash: bytes, name: str) -> None:
        """Note that the replica has listed the block."""
        names = self._names.get(block_hash)
        if names is None:
            self._names[block_hash] = {name}
        else:
            names.add(name)

    def find(self, block_hash: bytes, lists: Callable[[str, bytes], bool]) -> list[str]:
        """Replicas that have the block, in no order. ``lists`` tells whether one still does."""
        names = self._names.get(block_hash)
        if names is None:
            return []
        gone = [name for name in names if not lists(name, block_hash)]
        names.difference_update(gone)
        if not names:
            del self._names[block_hash]
        return list(names)

    def sweep(self, lists: Callable[[str, bytes], bool]) -> None:
        """Drop outdated entries, if the directory has grown large."""
        if len(self._names) > self._most:
            for block_hash in list(self._names):
                self.find(block_hash, lists)
            self._most = max(2 * len(self._names), LEAST_SWEPT)
