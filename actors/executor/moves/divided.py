"""Pulls from an executor with another number of ranks: the own part of a block is cut out of those of its ranks.

Blocks of each of these ranks are copied whole, a few at a time, into a staging buffer, and the wanted heads from there.
A group with twice as many ranks therefore copies twice the bytes that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagebus.actors.executor.device.promises import Early
from pagebus.actors.executor.memory.block_cuts import Cut
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.source import Source
from pagebus.bus.messages import Int32Array

STAGED_BYTES = 16 << 20
"""Size of the staging buffer for each rank's blocks."""


class DividedSource:
    """As :class:`Source`, for ``ranks`` of one executor, each with the cuts of its blocks that are wanted."""

    def __init__(self, ranks: Sequence[tuple[Address, Sequence[Cut]]], own: Blocks, *, network: bool) -> None:
        self._own = own
        self._count = max(1, STAGED_BYTES // max(address.block_bytes for address, _ in ranks))
        self._ranks = [_Rank(address, cuts, own, self._count, network=network) for address, cuts in ranks]

    def prepare(self, sources: Int32Array, *, hosts: bool = False) -> None:
        """As of :class:`Source`."""
        for rank in self._ranks:
            rank.source.prepare(sources, hosts=hosts)

    def copy(
        self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool], *, hosts: bool = False,
        early: Early | None = None,
    ) -> None:  # fmt: skip
        """As of :class:`Source`."""
        for start in range(0, len(sources), self._count):
            some = slice(start, start + self._count)
            places = np.arange(len(sources[some]), dtype=np.int32)
            for rank in self._ranks:
                rank.source.copy(sources[some], places, stop, hosts=hosts)
                self._own.put(targets[some], rank.staged, rank.cuts)

    @property
    def is_gone(self) -> bool:
        """As of :class:`Source`; of any rank."""
        return any(rank.source.is_gone for rank in self._ranks)

    def close(self) -> None:
        """As of :class:`Source`."""
        for rank in self._ranks:
            rank.source.close()


class _Rank:
    """One of them, and its staging buffer."""

    def __init__(self, address: Address, cuts: Sequence[Cut], own: Blocks, count: int, *, network: bool) -> None:
        self.cuts, self.staged = cuts, own.beside(count, address.block_bytes)
        self.source = Source(address, self.staged, network=network)
