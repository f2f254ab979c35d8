"""Receives the bytes of a request body: within a deadline and, for long bodies, in the client's turn."""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader, web

from pagebus.web.access.turns import Turn
from pagebus.web.http.errors import ApiError
from pagebus.web.http.limits import BODY_STALL_S, BODY_TIMEOUT_S, READ_S_PER_BYTE, TURN_BODY_BYTES


class Arrival:
    """The bytes of one body. Its deadline covers waiting for bytes, but not waiting for a turn."""

    def __init__(self, request: web.Request, turn: Turn) -> None:
        self._content: StreamReader = request.content
        self._turn = turn
        self._left_s = BODY_TIMEOUT_S
        self._is_slow = False
        """Whether it has delayed other clients. If so, it takes a turn for each piece that has arrived."""
        self._num_bytes = request.content_length or 0
        """Its size, as announced or as received so far."""
        self._num_come = 0

    async def next(self) -> bytes:
        """The next piece; b"" is the end, at which the body has its turn if it is long.

        Raises:
            ApiError: 408; 400, this is no body; 429, it may not wait for its turn.
        """
        if self._is_long and not self._is_slow:
            await self._turn.begin()
        piece = await self._piece()
        self._num_come += len(piece)
        self._num_bytes = max(self._num_bytes, self._num_come)
        if self._is_long:
            await self._turn.begin()
            self._turn.charge(len(piece) * READ_S_PER_BYTE)
            if self._is_slow and piece:
                self._turn.end()
        return piece

    @property
    def _is_long(self) -> bool:
        return self._num_bytes > TURN_BODY_BYTES

    async def _piece(self) -> bytes:
        try:
            if self._content.is_eof():
                return self._content.read_nowait()
            if self._turn.held:
                return await self._within(min(BODY_STALL_S, self._left_s))
        except TimeoutError:
            self._turn.end()
            self._is_slow = True
        try:
            return await self._within(self._left_s)
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s.", code="body_timeout") from None

    async def _within(self, seconds: float) -> bytes:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout(seconds):
                return await self._content.readany()
        finally:
            self._left_s -= clock() - began_s
