"""Reads the results of all replicas, each from its own position."""

from __future__ import annotations

from collections.abc import Mapping

from pagebus.bus.contract import START, Bus, Entry, EntryId
from pagebus.bus.streams import Names

READ_COUNT = 512
READ_BLOCK_MS = 200
"""Longest wait of one read, in ms; the results of a replica that joins are read after at most this time."""


class ResultStreams:
    """Positions of results that were read, and of those that were handled. ``positions`` are the latter, by replica,
    and include replicas that are gone until their streams are deleted.

    Args:
        positions: how far a predecessor's results have been read.
    """

    def __init__(self, bus: Bus, names: Names, positions: Mapping[str, EntryId]) -> None:
        self.positions = dict(positions)
        self._bus = bus
        self._names = names
        self._read: dict[str, EntryId] = {}
        self._replica_of: dict[str, str] = {}

    @property
    def is_reading(self) -> bool:
        """Whether there is a replica to read from."""
        return bool(self._read)

    def follow(self, replica: str) -> None:
        """Read this replica's results from now on."""
        self._read[replica] = self.positions.setdefault(replica, START)
        self._replica_of[self._names.results(replica)] = replica

    def leave(self, replica: str) -> None:
        """Stop reading a replica that is gone."""
        self._read.pop(replica, None)

    def forget(self, replica: str) -> None:
        """Drop the position of a replica whose streams are deleted."""
        if replica not in self._read:
            self.positions.pop(replica, None)
            self._replica_of.pop(self._names.results(replica), None)

    async def read(self) -> list[Entry]:
        """New results of followed replicas; waits for them for a while."""
        positions = {self._names.results(replica): at for replica, at in self._read.items()}
        entries = await self._bus.read(positions, count=READ_COUNT, block_ms=READ_BLOCK_MS)
        entries = [entry for entry in entries if self.replica_of(entry) in self._read]  # some may have been left
        for entry in entries:
            self._read[self.replica_of(entry)] = entry.id
        return entries

    def replica_of(self, entry: Entry) -> str:
        """The replica that wrote an entry; "" if unknown."""
        return self._replica_of.get(entry.stream, "")

    def taken(self, entry: Entry) -> None:
        """Mark an entry as handled."""
        self.positions[self._replica_of[entry.stream]] = entry.id
