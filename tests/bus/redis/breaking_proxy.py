"""Between a bus and its Redis: connections that break after a command was applied, before its answer arrives."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path


class BreakingProxy:
    """Passes bytes on. The answer to exchange number ``breaks_at`` (from 0, over all connections) is thrown away, and
    every connection is closed; ``None``: no answer is. What a client sends in one piece is one exchange.

    With a ``chance`` any exchange may lose its connection: half of them before the command has arrived, half after.
    While ``passes`` is cleared nothing arrives anywhere, and nobody is told: a network that is cut. What was sent
    arrives once it is set again, as TCP sees to.
    """

    def __init__(self, server: str, socket: Path, *, seed: int = 0) -> None:
        self.url = f"unix://{socket}"
        self.exchanges = 0
        self.breaks_at: int | None = None
        self.chance = 0.0
        self.passes = asyncio.Event()
        self.passes.set()
        self.broken = 0
        self._rng = random.Random(seed)
        self._server = server
        self._socket = socket
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[BreakingProxy]:
        """Listen while the block runs."""
        server = await asyncio.start_unix_server(self._serve, self._socket)
        try:
            yield self
        finally:
            server.close()
            self._close_all()
            await server.wait_closed()

    def begin(self, breaks_at: int | None) -> None:
        """Count exchanges from 0 again."""
        self.exchanges, self.breaks_at = 0, breaks_at

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_unix_connection(self._server)
        self._writers |= {writer, upstream}
        breaking = asyncio.Event()
        answering = asyncio.create_task(self._answer(upstream_reader, writer, breaking))
        with contextlib.suppress(OSError):
            while command := await reader.read(2**20):
                number, self.exchanges = self.exchanges, self.exchanges + 1
                breaks = self._rng.random() < self.chance
                self.broken += breaks
                if breaks and self._rng.random() < 0.5:
                    break
                if breaks or number == self.breaks_at:
                    breaking.set()
                await self.passes.wait()
                upstream.write(command)
                if breaking.is_set():
                    await answering
                    if number == self.breaks_at:
                        self._close_all()
                    break
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        for each in (writer, upstream):
            self._writers.discard(each)
            each.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, breaking: asyncio.Event
    ) -> None:
        """Pass answers on, until the first one that is to be lost has come."""
        with contextlib.suppress(OSError):
            while (answer := await reader.read(2**20)) and not breaking.is_set():
                await self.passes.wait()
                writer.write(answer)

    def _close_all(self) -> None:
        for writer in self._writers:
            writer.close()
