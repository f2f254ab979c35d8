"""Reads the cache or the host tier of an executor through NIXL, on whichever host it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.executor.memory.layout import Layout
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.carriers.runs import chunks, runs
from pagebus.actors.executor.moves.nixl.link import Link, Wanted
from pagebus.actors.executor.moves.nixl.package import DEVICE, HOST, Pieces
from pagebus.actors.executor.moves.nixl.regions import Place, place_of
from pagebus.bus.messages import Int32Array

PIECE_BYTES = 16 << 20
"""Of one transfer: between two of them a pull may be abandoned."""


class Nixl:
    """The carrier, over a ``link`` that it may share with that of the executor's other tier. ``address`` is that of the
    cache, or of the host tier, whose blocks are behind the ``page`` at ``base``."""

    def __init__(self, address: Address, link: Link, own: Blocks, page: int, base: int, gpu: int | None) -> None:
        self._address, self._link, self._own = address, link, own
        self._page, self._base, self._gpu = page, base, gpu

    def prepare(self, sources: Int32Array) -> None:
        """As in :class:`Carrier`."""

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """As in :class:`Carrier`."""
        self._check(stop)
        kind = HOST if self._gpu is None else DEVICE
        self._link.read(self._wanted(sources, targets), kind, stop)
        self._check(stop)

    def close(self) -> None:
        """As in :class:`Carrier`."""
        self._link.close()

    def _check(self, stop: Callable[[], bool]) -> None:
        """The cache is still the one of the address."""
        if self._link.page(self._page, stop) != self._address.nonce:
            raise MoveError("the source does not have this cache any more")

    def _wanted(self, sources: Int32Array, targets: Int32Array) -> Iterator[Wanted]:
        """Neighbouring blocks are one piece."""
        layout, most = self._address.layout, max(1, PIECE_BYTES // self._own.block_bytes)
        place = place_of(self._own)
        for some, places in zip(chunks(sources, most), chunks(targets, most), strict=True):
            joined = np.array(runs(some, places, most, layout.per_chunk), np.int32)
            theirs = Place(self._base, 0, self._gpu or 0)
            own = Layout(layout.block_bytes)
            yield _pieces(theirs, layout, joined[:, 0], joined[:, 2]), _pieces(place, own, joined[:, 1], joined[:, 2])


def _pieces(place: Place, layout: Layout, first: NDArray[np.int32], counts: NDArray[np.int32]) -> Pieces:
    """Runs of blocks."""
    gpus = np.full(len(first), place.gpu)
    rows = (layout.offsets(first) + place.base, counts.astype(np.int64) * layout.block_bytes, gpus)
    return np.stack(rows, axis=1).astype(np.uint64)


def nixl_carriers(address: Address, own: Blocks) -> tuple[list[Nixl], list[Nixl]]:
    """To the cache, and to the host tier; none if its executor does not lend through NIXL."""
    told, hosts = address.nixl, address.host_tier()
    if told is None:
        return [], []
    link = Link(told.agent, own)
    cache = Nixl(address, link, own, told.page, told.base, told.gpu if address.device else None)
    tier = [] if hosts is None else [Nixl(hosts, link, own, told.hosts_page, told.hosts_base, None)]
    return [cache], tier
