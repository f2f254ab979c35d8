"""Connections without sockets: what one side writes, the other is given a moment later, in its own process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.dst.loop import Process, SimulatedLoop

LATENCY_S = (5e-5, 1e-3)


class MemorySocket:
    """All that a listening socket is asked for."""

    def __init__(self, port: int) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port


@dataclass(eq=False)
class Listener:
    """A server that accepts connections; ``pipes`` are the server's ends of those that are open."""

    loop: SimulatedLoop
    port: int
    factory: Callable[[], asyncio.Protocol]
    process: Process
    pipes: dict[Pipe, None] = field(default_factory=dict)

    def close(self) -> None:
        """Accept no more."""
        if self.loop.listeners.get(self.port) is self:
            del self.loop.listeners[self.port]

    def break_all(self) -> None:
        """The process is gone: its clients learn that."""
        self.close()
        for pipe in list(self.pipes):
            pipe.other.lose(ConnectionResetError("the server is gone"))
        self.pipes.clear()


class Pipe(asyncio.Transport):
    """One end of a connection."""

    other: Pipe

    def __init__(self, loop: SimulatedLoop, process: Process, name: str, rng: random.Random) -> None:
        super().__init__()
        self._loop, self._process, self._name, self._rng = loop, process, name, rng
        self.protocol: Any = None
        self.listener: Listener | None = None
        self._arrives_s = 0.0
        self._closing = self._lost = self._paused = False
        self._held: list[bytes] = []

    # -- what the other end does --------------------------------------------------------------------------------------
    def give(self, data: bytes) -> None:
        """Data has arrived."""
        if self._paused:
            self._held.append(data)
        elif not self._closing:
            self.protocol.data_received(data)

    def lose(self, error: Exception | None) -> None:
        """The connection is gone. Any process may say so."""
        if not self._lost:
            self._lost = self._closing = True
            if self.listener is not None:
                self.listener.pipes.pop(self, None)
            self._loop.call_soon(self.protocol.connection_lost, error, context=self._process.context.copy())

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        """Call something at the other end, after all that was sent before."""
        self._arrives_s = max(self._loop.now_s + self._rng.uniform(*LATENCY_S), self._arrives_s + 1e-6)
        self._loop.call_at(self._arrives_s, call, *args, context=self.other._process.context.copy())

    # -- asyncio's contract -------------------------------------------------------------------------------------------
    def write(self, data: Any) -> None:
        if not self._closing:
            self._later(self.other.give, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._later(self.other.lose, None)
            self.lose(None)

    def abort(self) -> None:
        if not self._lost:
            self._later(self.other.lose, ConnectionResetError("reset by the other side"))
            self.lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        held, self._held = self._held, []
        for data in held:
            self.give(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._name, 1) if name == "peername" else default

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False


def connect_pipe(
    loop: SimulatedLoop,
    factory: Callable[[], asyncio.Protocol],
    listener: Listener,
    process: Process,
    name: str,
    rng: random.Random,
) -> asyncio.Protocol:
    """A connection between ``process`` and the listener's; returns the first one's protocol."""
    near, far = Pipe(loop, process, name, rng), Pipe(loop, listener.process, name, rng)
    near.other, far.other = far, near
    far.listener = listener
    listener.pipes[far] = None

    def accept() -> None:
        far.protocol = listener.factory()
        far.protocol.connection_made(far)

    near._later(accept)
    near.protocol = factory()
    near.protocol.connection_made(near)
    return near.protocol
