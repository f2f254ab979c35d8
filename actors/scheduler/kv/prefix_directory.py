"""Which replicas may have cached how a prompt begins: found by its first block, without asking all of them.

A superset is enough: whoever looks up asks the replica, and says so if it has forgotten the block. What nobody looks up
is swept out when there is twice as much as there was after the last sweep, so each entry costs little and all of them
are in proportion to what is cached.
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
        """The replica has listed the block."""
        names = self._names.get(block_hash)
        if names is None:
            self._names[block_hash] = {name}
        else:
            names.add(name)

    def find(self, block_hash: bytes, lists: Callable[[str, bytes], bool]) -> list[str]:
        """The replicas that have the block, in no order. ``lists`` says whether one still does."""
        names = self._names.get(block_hash)
        if names is None:
            return []
        gone = [name for name in names if not lists(name, block_hash)]
        names.difference_update(gone)
        if not names:
            del self._names[block_hash]
        return list(names)

    def sweep(self, lists: Callable[[str, bytes], bool]) -> None:
        """Forget what has been forgotten, if it may be much."""
        if len(self._names) > self._most:
            for block_hash in list(self._names):
                self.find(block_hash, lists)
            self._most = max(2 * len(self._names), LEAST_SWEPT)
