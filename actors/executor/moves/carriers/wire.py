"""The protocol over TCP: a request for blocks, one byte that says whether they come, and their bytes."""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Callable

import numpy as np

from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.bus.messages import Int32Array

TIMEOUT_S = 10.0
"""After this time without a byte the other side is taken to hang."""
LOOK_S = 0.1
"""How often a thread that waits for bytes looks whether its pull is still wanted."""
MOST_BLOCKS = 16384
"""Of one request."""
SECRET_BYTES = 32
_MAGIC = b"pgbsmv01"
_HEAD = struct.Struct(f"<{len(_MAGIC)}s16s{SECRET_BYTES}sI")
"""Format, the cache's nonce, its secret, how many blocks; then their ids, four bytes each."""
COMING, NO_SUCH_BLOCK = b"\x01", b"\x02"


def request(nonce: bytes, secret: bytes, ids: Int32Array) -> bytes:
    """A request for blocks."""
    return _HEAD.pack(_MAGIC, nonce, secret, len(ids)) + ids.astype("<i4").tobytes()


def read_request(receive: Callable[[memoryview], None], nonce: bytes, secret: bytes) -> Int32Array:
    """The ids of a request.

    Raises:
        MoveError: it is not a request, its sender does not know the secret, or it is for too many blocks.
    """
    head = bytearray(_HEAD.size)
    receive(memoryview(head))
    magic, told_nonce, told_secret, count = _HEAD.unpack(head)
    if magic != _MAGIC or not hmac.compare_digest(told_nonce + told_secret, nonce + secret):
        raise MoveError("not one of us")
    if not 1 <= count <= MOST_BLOCKS:
        raise MoveError(f"{count} blocks are asked for, at most {MOST_BLOCKS} are allowed")
    ids = bytearray(4 * count)
    receive(memoryview(ids))
    return np.frombuffer(ids, "<i4").astype(np.int32)


class Receiver:
    """Receives exactly what is asked for. Without a byte for ``timeout_s``, or if ``stop`` says so, it fails.
    ``until_s``: the latest time at all, of the monotonic clock."""

    def __init__(
        self, sock: socket.socket, timeout_s: float, stop: Callable[[], bool], until_s: float = float("inf")
    ) -> None:
        self._sock, self._timeout_s, self._stop, self._until_s = sock, timeout_s, stop, until_s
        sock.settimeout(min(LOOK_S, timeout_s))

    def __call__(self, piece: memoryview) -> None:
        """Fill ``piece``.

        Raises:
            MoveError: the other side hangs, or has closed the connection.
        """
        heard_s = time.monotonic()
        while len(piece):
            if self._stop():
                raise Abandoned("abandoned")
            try:
                count = self._sock.recv_into(piece)
            except TimeoutError:
                now_s = time.monotonic()
                if now_s - heard_s < self._timeout_s and now_s < self._until_s:
                    continue
                raise MoveError(f"nothing has come for {now_s - heard_s:.1f} s") from None
            except ConnectionError:
                count = 0
            if not count:
                raise MoveError("the other side has closed the connection")
            piece, heard_s = piece[count:], time.monotonic()
            if heard_s > self._until_s:
                raise MoveError("it comes too slowly")
