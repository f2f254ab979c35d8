"""Between a bus and its Redis: connections that break after a command was applied, before its answer arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class BreakingProxy:
    """Passes bytes on. The answer to exchange number ``breaks_at`` (from 0, over all connections) is thrown away, and
    every connection is closed; ``None``: no answer is. What a client sends in one piece is one exchange."""

    def __init__(self, server: str, socket: Path) -> None:
        self.url = f"unix://{socket}"
        self.exchanges = 0
        self.breaks_at: int | None = None
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
        with contextlib.suppress(OSError):
            while command := await reader.read(2**20):
                number, self.exchanges = self.exchanges, self.exchanges + 1
                upstream.write(command)
                answer = await upstream_reader.read(2**20)
                if number == self.breaks_at:
                    self._close_all()
                    break
                writer.write(answer)
        for each in (writer, upstream):
            self._writers.discard(each)
            each.close()

    def _close_all(self) -> None:
        for writer in self._writers:
            writer.close()
