"""The ring of stages: each rank passes on what it has computed of a step to the same rank of the next stage, and the
last stage passes sampled tokens to the first.

Each rank has a connection to the rank behind it and one from the rank before it, and a thread for each: a message is
on its way while the next step is computed. Only plain bytes travel, behind a header of fixed length.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import struct
import threading
import time

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError

HEADER = struct.Struct("<QQIQ")
"""Generation, step, digest, and the number of bytes that follow."""
ADDRESS = struct.Struct("<16sH64s")
"""What ranks tell each other at start: a secret by which the connection is known, the port, and the address."""
CONNECT_S = 60.0
"""Longest wait for a neighbour, when all ranks have met."""
SMALL = 1 << 16
"""Bytes that are sent together with their header: the copy takes less time than another call."""


class Ring:
    """One rank's place in it.

    Args:
        rank: this rank; messages come from ``before`` and go to ``behind``.
        hostname: the address of this host under which other ranks reach it.
        generation: the group's.
        timeout_s: longest wait for a message.
    """

    def __init__(self, rank: int, before: int, behind: int, hostname: str, generation: int, timeout_s: float) -> None:
        self._rank, self._before, self._behind = rank, before, behind
        self._hostname, self._generation, self._timeout_s = hostname, generation, timeout_s
        self._inbox: queue.SimpleQueue[tuple[int, int, torch.Tensor] | EngineError] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[bytes, torch.Tensor] | None] = queue.SimpleQueue()
        self._sockets: list[socket.socket] = []
        self._pinned = False

    def pin(self) -> None:
        """Put what arrives into page-locked memory, from which a GPU copies while the host goes on."""
        self._pinned = True

    def connect(self, world: Comm) -> None:
        """Connect to both neighbours, whose addresses are told over ``world``.

        Raises:
            EngineError: a neighbour was not reached, or is lost.
        """
        try:
            self._connect(world)
        except (OSError, ValueError, struct.error) as error:
            raise EngineError(f"rank {self._rank} does not reach its neighbours in the pipeline: {error}") from error

    def _connect(self, world: Comm) -> None:
        secret = secrets.token_bytes(16)
        family = socket.AF_INET6 if ":" in self._hostname else socket.AF_INET
        with socket.create_server((self._hostname, 0), family=family) as listener:
            own = ADDRESS.pack(secret, listener.getsockname()[1], self._hostname.encode())
            told = world.all_gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
            key, port, host = ADDRESS.unpack(told[self._behind].numpy().tobytes())
            sending = socket.create_connection((host.rstrip(b"\0").decode(), port), timeout=CONNECT_S)
            self._sockets.append(sending)
            sending.sendall(key)
            receiving = self._accept(listener, secret)
        self._sockets.append(receiving)
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sending.settimeout(self._timeout_s)
        receiving.settimeout(None)
        for name, work, connection in (("send", self._send_all, sending), ("receive", self._receive_all, receiving)):
            threading.Thread(target=work, args=(connection,), name=f"stage-{name}", daemon=True).start()

    def _accept(self, listener: socket.socket, secret: bytes) -> socket.socket:
        """The connection that knows the secret; others are closed."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = listener.accept()
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                if secrets.compare_digest(bytes(read_exactly(connection, len(secret))), secret):
                    return connection
            connection.close()

    def send(self, step: int, digest: int, x: torch.Tensor) -> None:
        """Pass x on, which is on the host and not written to afterwards. One thread; does not wait."""
        payload = x.contiguous().view(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)
        self._outbox.put((HEADER.pack(self._generation, step, digest, len(payload)), payload))

    def take(self, step: int, digest: int) -> torch.Tensor:
        """The bytes that were passed on for this step, uint8 [N]. Device thread.

        Raises:
            EngineError: they did not come in time, or a neighbour is lost or has another step or digest.
        """
        try:
            told = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise EngineError(
                f"rank {self._rank} has waited {self._timeout_s:.0f} s for step {step} of rank {self._before}"
            ) from None
        if isinstance(told, EngineError):
            raise told
        theirs, their_digest, payload = told
        if (theirs, their_digest) != (step, digest):
            raise EngineError(
                f"the ranks have drifted apart (rank {self._before}: step {theirs}, {their_digest:08x}, rank "
                f"{self._rank}: step {step}, {digest:08x})"
            )
        return payload

    @property
    def has_message(self) -> bool:
        """Whether :meth:`take` would not wait."""
        return not self._inbox.empty()

    def close(self) -> None:
        """Drop the connections; neighbours that wait for this rank fail at once."""
        self._outbox.put(None)
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _send_all(self, connection: socket.socket) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                header, payload = message
                if len(payload) <= SMALL:
                    connection.sendall(header + payload.numpy().tobytes())
                else:
                    connection.sendall(header)
                    connection.sendall(payload.numpy().data)
        except OSError as error:
            self._inbox.put(EngineError(f"rank {self._rank} has lost rank {self._behind}: {error}"))

    def _receive_all(self, connection: socket.socket) -> None:
        try:
            while True:
                generation, step, digest, length = HEADER.unpack(read_exactly(connection, HEADER.size))
                if generation != self._generation:
                    raise OSError(f"it is of generation {generation}, not {self._generation}")
                payload = torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned and length > 0)
                fill(connection, payload.numpy().data)
                self._inbox.put((step, digest, payload))
        except OSError as error:
            self._inbox.put(EngineError(f"rank {self._rank} has lost rank {self._before}: {error}"))


def read_exactly(connection: socket.socket, count: int) -> bytearray:
    """The next ``count`` bytes. Raises OSError if the other side has closed."""
    found = bytearray(count)
    fill(connection, memoryview(found))
    return found


def fill(connection: socket.socket, target: memoryview) -> None:
    """Read as many bytes as ``target`` has, in one call where none of them is late. Raises OSError if the other side
    has closed."""
    done = 0
    while done < len(target):
        got = connection.recv_into(target[done:], 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("it has closed the connection")
        done += got
