"""Reads the cache of another process's GPU, over CUDA's handles of memory: copies from device to device."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from pagebus.actors.executor.device.promises import Early
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.driver import HANDLE_BYTES
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.shared_file import check_page, open_page
from pagebus.bus.messages import Int32Array


class DeviceMemory:
    """The carrier. The memory is opened with the first pull. While it is open it is not free, even if its process has
    ended: close it then."""

    def __init__(self, address: Address, own: DeviceBlocks) -> None:
        self._address, self._own = address, own
        self._base = 0
        """Where the allocation lies in this process; 0: it is not open."""

    def prepare(self, sources: Int32Array) -> None:
        """As in :class:`Carrier`."""

    def copy(
        self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool], early: Early | None = None
    ) -> None:
        """As in :class:`Carrier`. ``early``: what may be told before the blocks are there."""
        address = self._address
        if address.pid == os.getpid():
            raise MoveError("a process cannot open its own memory of a GPU")
        page = open_page(address)

        def tell(event: torch.cuda.Event) -> None:
            if early is not None:
                check_page(page, address)
                early.tell(event)

        try:
            self._open()
            checked = None if early is None else Early(early.num_blocks, tell)
            self._own.copy_from(self._base + address.offset, sources, targets, stop, early=checked)
            check_page(page, address)
        finally:
            os.close(page)

    def close(self) -> None:
        """As in :class:`Carrier`."""
        if self._base:
            self._own.driver.close(self._base)
            self._base = 0

    def _open(self) -> None:
        if self._base:
            return
        try:
            handle = bytes.fromhex(self._address.handle)
        except ValueError as error:
            raise MoveError("the source's handle cannot be read") from error
        if len(handle) != HANDLE_BYTES:
            raise MoveError(f"the source's handle has {len(handle)} bytes")
        self._base = self._own.driver.open(handle)
