"""Reads shared memory of another process of the host, a file that is opened by its number: the cache of a CPU executor,
or a host tier."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from pagebus.actors.executor.memory.shared_memory import HEADER_BYTES, NONCE_BYTES
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.carriers.runs import runs
from pagebus.bus.messages import Int32Array


def open_page(address: Address, flags: int = os.O_RDONLY) -> int:
    """Open the file that begins with the cache's page.

    Raises:
        MoveError: the process is gone, or has no such cache any more.
    """
    try:
        file = os.open(f"/proc/{address.pid}/fd/{address.file}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise MoveError(f"process {address.pid} is gone, or cannot be read: {error.strerror}") from error
    try:
        check_page(file, address)
    except BaseException:
        os.close(file)
        raise
    return file


def check_page(file: int, address: Address) -> None:
    """The cache is still the one of the address.

    Raises:
        MoveError: it is not.
    """
    try:
        found = os.pread(file, NONCE_BYTES, 0)
    except OSError as error:
        raise MoveError(f"process {address.pid} has another file in place of its cache: {error.strerror}") from error
    if found.hex() != address.nonce:
        raise MoveError(f"process {address.pid} does not have this cache any more")


def is_there(address: Address) -> bool:
    """Whether the process lives and has the cache."""
    try:
        os.close(open_page(address))
    except MoveError:
        return False
    return True


class SharedFile:
    """The carrier. Nothing stays open between two pulls, so that the memory of a dead process is free."""

    def __init__(self, address: Address, own: Blocks) -> None:
        self._address, self._own = address, own

    def prepare(self, sources: Int32Array) -> None:
        """As in :class:`Carrier`."""

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """As in :class:`Carrier`."""
        address, layout, each = self._address, self._address.layout, self._address.block_bytes
        file, done = open_page(address), 0

        def receive(piece: memoryview) -> None:
            """The blocks of the next targets."""
            nonlocal done
            if stop():
                raise Abandoned("abandoned")
            wanted = sources[done : done + len(piece) // each]
            places = np.arange(len(wanted), dtype=np.int32)
            for source, place, count in runs(wanted, places, len(wanted), layout.per_chunk):
                _read(file, piece[place * each : (place + count) * each], HEADER_BYTES + layout.offset(source))
            done += len(wanted)

        try:
            self._own.fill(targets, receive)
            check_page(file, address)
        except OSError as error:
            raise MoveError(f"the cache of process {address.pid} cannot be read: {error.strerror}") from error
        finally:
            os.close(file)

    def close(self) -> None:
        """As in :class:`Carrier`."""


def _read(file: int, piece: memoryview, offset: int) -> None:
    while len(piece):
        count = os.preadv(file, (piece,), offset)
        if not count:
            raise MoveError("the cache ends before the block")
        piece, offset = piece[count:], offset + count
