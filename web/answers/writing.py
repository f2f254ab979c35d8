"""Writes responses, streams and whole ones, without letting a slow client delay others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Streams:
    """All answers that an ingress writes, streams and whole ones; one tick checks all of them for clients that no
    longer read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._open: set[Writing] = set()

    def add(self, writing: Writing) -> None:
        self._open.add(writing)

    def remove(self, writing: Writing) -> None:
        self._open.discard(writing)

    def cut_blocked(self, limit_s: float) -> int:
        """Drop the connections whose last write has not been taken for ``limit_s``; returns how many.

        Their handlers are cancelled by that, as by any disconnect. Looking once in a while instead of a timer per write
        keeps the writes cheap.
        """
        now_s = self.clock()
        blocked = [
            writing for writing in self._open
            if writing.writing_since_s is not None and now_s - writing.writing_since_s > limit_s
        ]  # fmt: skip
        for writing in blocked:
            writing.cut()
        return len(blocked)


class Writing:
    """One response that is written by its handler."""

    def __init__(self, request: web.Request, streams: Streams, response: web.StreamResponse) -> None:
        self._request = request
        self._streams = streams
        self._response = response
        self.writing_since_s: float | None = None

    async def _open(self) -> None:
        self._streams.add(self)
        await self._response.prepare(self._request)

    async def end(self, data: bytes = b"") -> web.StreamResponse:
        """Write what is left, and end the response: when this returns, the client has it as far as we can know."""
        self.writing_since_s = self._streams.clock()
        if not self._response.prepared:
            await self._open()
        await self._response.write_eof(data)
        self.writing_since_s = None
        return self._response

    def close(self) -> None:
        """End the writing in any case."""
        self._streams.remove(self)

    def cut(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()


class EventStream(Writing):
    """One response of events. Opened with its first bytes, so that an error before them can still be a status."""

    def __init__(self, request: web.Request, streams: Streams, headers: Mapping[str, str] = HEADERS) -> None:
        super().__init__(request, streams, web.StreamResponse(headers=headers))

    @property
    def opened(self) -> bool:
        return self._response.prepared

    async def write(self, events: bytes) -> None:
        """Write, waiting while the client is behind.

        Raises:
            ConnectionResetError: the client is gone.
        """
        self.writing_since_s = self._streams.clock()
        if not self._response.prepared:
            await self._open()
        await self._response.write(events)
        self.writing_since_s = None

    async def _open(self) -> None:
        if self._request.version < HttpVersion11:  # has no chunks: only the connection's end can end the stream
            self._response.force_close()
        await super()._open()
