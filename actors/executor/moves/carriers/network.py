"""Reads the cache of an executor on another host, over TCP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pagebus.actors.executor.moves.carriers import wire
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.carriers.runs import chunks
from pagebus.bus.messages import Int32Array

CONNECTIONS = 4
"""Connections at a time: one alone moves about 2.5 GB/s."""
LEAST_BYTES = 16 << 20
"""A further connection is opened for at least this many bytes."""


class Network:
    """The carrier. Each request has a connection of its own. ``first``: the number by which the server knows the first
    block; those of a host tier come behind all blocks of the device."""

    def __init__(self, address: Address, own: Blocks, timeout_s: float = wire.TIMEOUT_S, first: int = 0) -> None:
        self._address, self._own, self._timeout_s, self._first = address, own, timeout_s, first

    def prepare(self, sources: Int32Array) -> None:
        """As in :class:`Carrier`."""

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """As in :class:`Carrier`."""
        count = max(1, min(CONNECTIONS, len(sources) * self._own.block_bytes // LEAST_BYTES))
        if count == 1:
            self._copy(sources, targets, stop)
            return
        most, over = -(-len(sources) // count), threading.Event()

        def part(wanted: Int32Array, places: Int32Array) -> None:
            try:
                self._copy(wanted, places, lambda: over.is_set() or stop())
            except BaseException:
                over.set()
                raise

        with ThreadPoolExecutor(count, "pull", self._own.prepare_thread) as threads:
            pairs = zip(chunks(sources, most), chunks(targets, most), strict=True)
            parts = [threads.submit(part, *pair) for pair in pairs]
        errors = [error for each in parts if (error := each.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, Abandoned)), errors[0])

    def _copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        where = self._address.name, self._address.port
        parts = zip(chunks(sources, wire.MOST_BLOCKS), chunks(targets, wire.MOST_BLOCKS), strict=True)
        try:
            for wanted, places in parts:
                with socket.create_connection(where, self._timeout_s) as sock:
                    self._request(sock, wanted, places, stop)
        except OSError as error:
            raise MoveError(f"{where[0]}:{where[1]}: {type(error).__name__}: {error}") from error

    def _request(self, sock: socket.socket, wanted: Int32Array, places: Int32Array, stop: Callable[[], bool]) -> None:
        try:
            nonce, secret = bytes.fromhex(self._address.nonce), bytes.fromhex(self._address.secret)
        except ValueError as error:
            raise MoveError("the source's address cannot be read") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(wire.request(nonce, secret, wanted + np.int32(self._first)))
        receive, status = wire.Receiver(sock, self._timeout_s, stop), bytearray(1)
        receive(memoryview(status))
        if status != wire.COMING:
            raise MoveError("the source has no such block")
        self._own.fill(places, receive)

    def close(self) -> None:
        """As in :class:`Carrier`."""
