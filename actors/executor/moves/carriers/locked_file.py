"""Reads the host tier of another process of the host into a GPU: its memory is mapped here, and page-locked for this
process too, so that the copy engine reads it as it does the own host tier."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.executor.memory.shared_memory import HEADER_BYTES
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.shared_file import check_page, open_page
from pagebus.bus.messages import Int32Array


class LockedFile:
    """The carrier. Chunks are locked as they are first read from. While any is, its memory is not free, even if the
    process has ended: close it then."""

    def __init__(self, address: Address, own: DeviceBlocks) -> None:
        self._address, self._own = address, own
        self._mapped: NDArray[np.uint8] | None = None
        self._locked: set[int] = set()
        """Addresses of chunks."""
        self._refusal = ""
        """Why chunks cannot be locked."""

    def prepare(self, sources: Int32Array) -> None:
        """As in :class:`Carrier`."""
        address = self._address
        base = self._map() + HEADER_BYTES
        for chunk in np.unique(sources // address.per_chunk).tolist():
            start = base + chunk * address.stride
            if start in self._locked:
                continue
            if self._refusal:
                raise MoveError(self._refusal)
            try:
                self._own.driver.lock(start, address.stride)
            except MoveError as error:
                self._refusal = str(error)
                raise
            self._locked.add(start)

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """As in :class:`Carrier`."""
        address = self._address
        page = open_page(address)
        try:
            self.prepare(sources)
            base = self._map() + HEADER_BYTES
            self._own.copy_from(base, sources, targets, stop, address.layout)
            check_page(page, address)
        finally:
            os.close(page)

    def close(self) -> None:
        """As in :class:`Carrier`."""
        for start in self._locked:
            self._own.driver.unlock(start)
        self._locked.clear()
        self._mapped = None

    def _map(self) -> int:
        """Where the file lies in this process."""
        if self._mapped is None:
            address = self._address
            size = HEADER_BYTES + -(-address.num_blocks // address.per_chunk) * address.stride
            file = open_page(address, os.O_RDWR)  # for pages that are only read there is no locking
            try:
                self._mapped = np.frombuffer(mmap.mmap(file, size), np.uint8)
            except (OSError, ValueError) as error:
                raise MoveError(f"the host tier of process {address.pid} cannot be mapped: {error}") from error
            finally:
                os.close(file)
        return int(self._mapped.ctypes.data)
