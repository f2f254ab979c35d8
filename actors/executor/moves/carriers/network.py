"""Reads the cache of an executor on another host, over TCP."""

from __future__ import annotations

import socket
from collections.abc import Callable

from pagebus.actors.executor.moves.carriers import wire
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.carriers.runs import chunks
from pagebus.bus.messages import Int32Array


class Network:
    """The carrier. Each request has a connection of its own."""

    def __init__(self, address: Address, own: Blocks, timeout_s: float = wire.TIMEOUT_S) -> None:
        self._address, self._own, self._timeout_s = address, own, timeout_s

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """As in :class:`Carrier`."""
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
        sock.sendall(wire.request(nonce, secret, wanted))
        receive, status = wire.Receiver(sock, self._timeout_s, stop), bytearray(1)
        receive(memoryview(status))
        if status != wire.COMING:
            raise MoveError("the source has no such block")
        self._own.fill(places, receive)

    def close(self) -> None:
        """As in :class:`Carrier`."""
