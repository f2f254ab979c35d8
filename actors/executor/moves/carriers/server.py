"""Sends blocks of the own cache over TCP to executors that know the secret, and nothing to anybody else."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time

from pagebus.actors.executor.moves.carriers import wire
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.carriers.lent_blocks import LentBlocks
from pagebus.bus.messages import Int32Array

MOST_CONNECTIONS = 64
MOST_SENDERS = 8
"""Each holds two buffers; further requests wait for their turn."""
_RETRY_S = 0.1


class Server:
    """Listens on ``name``, an address of this host, at a free port.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, name: str, blocks: Blocks | LentBlocks, nonce: bytes, timeout_s: float = wire.TIMEOUT_S) -> None:
        self._blocks, self._nonce, self._timeout_s = blocks, nonce, timeout_s
        self.secret = secrets.token_bytes(wire.SECRET_BYTES)
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        self._listener = socket.create_server((name, 0), family=family)
        self.name, self.port = name, int(self._listener.getsockname()[1])
        self._turns = threading.BoundedSemaphore(MOST_SENDERS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="moves-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more; what is being sent is cut off."""
        self._closing = True
        _shut(self._listener)
        self._listener.close()
        self._thread.join()
        with self._lock:
            left = list(self._open.items())
        for sock, _ in left:
            _shut(sock)
        for _, thread in left:
            thread.join()

    def _listen(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closing:
                    time.sleep(_RETRY_S)  # too many open files
                continue
            with self._lock:
                if len(self._open) >= MOST_CONNECTIONS or self._closing:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(sock,), name="moves-sender", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # too many threads: this pull fails, later ones may not
                    sock.close()
                    continue
                self._open[sock] = thread

    def _serve(self, sock: socket.socket) -> None:
        """Answer the one request of a connection. Whatever goes wrong, the other side sees it closed."""
        try:
            with contextlib.suppress(MoveError, OSError, RuntimeError):
                until_s = time.monotonic() + self._timeout_s
                receive = wire.Receiver(sock, self._timeout_s, lambda: self._closing, until_s)
                ids = wire.read_request(receive, self._nonce, self.secret)
                with self._turns:
                    self._send(sock, ids)
        finally:
            with self._lock:
                del self._open[sock]
            sock.close()

    def _send(self, sock: socket.socket, ids: Int32Array) -> None:
        sock.settimeout(self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if ids.min() < 0 or ids.max() >= self._blocks.num_blocks:
            sock.sendall(wire.NO_SUCH_BLOCK)
            return
        self._blocks.prepare_thread()
        sock.sendall(wire.COMING)
        for piece in self._blocks.read(ids):
            if self._closing:
                return
            _send_all(sock, piece)


def _send_all(sock: socket.socket, piece: memoryview) -> None:
    """Like ``sendall``, whose time limit would be for the whole piece."""
    while len(piece):
        piece = piece[sock.send(piece) :]


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
