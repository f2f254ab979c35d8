"""The byte stream of one open Redis connection: commands out, replies in, in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

Reply = Any
"""A RESP2 reply as hiredis parses it: bytes, int, None, lists of these, or a ResponseError in its place."""


class RedisStream(asyncio.Protocol):
    """Takes a connection over from the writer that opened it.

    Args:
        on_reply: is called with each reply.
        on_lost: is called once with the reason when the connection is gone, unless it was :meth:`drop` that ended it.
    """

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        on_reply: Callable[[Reply], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._writer = writer  # which closes its transport when collected
        self._transport = writer.transport
        self._parser = hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError)
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._is_over = False
        self._transport.set_protocol(self)

    def write(self, packed: bytes) -> None:
        """Send the data together with everything else written in this turn of the loop."""
        try:
            self._transport.write(packed)
        except (OSError, RuntimeError) as error:  # closed, and not reported yet
            self._lose(ConnectionError(str(error)))

    def drop(self) -> None:
        """Close the connection at once, without calling ``on_lost``. Idempotent."""
        self._is_over = True
        self._transport.abort()

    def _lose(self, error: Exception) -> None:
        if not self._is_over:
            self.drop()
            self._on_lost(error)

    # -- what the event loop calls ------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
            while not self._is_over and (reply := self._parser.gets()) is not False:  # False: the rest has to come
                self._on_reply(reply)
        except InvalidResponse as error:
            self._lose(error)

    def eof_received(self) -> None:
        self._lose(ConnectionError("Connection closed by server."))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(exc or ConnectionError("Connection closed by server."))
