"""How often a stream says something: events that hold several tokens, and comments while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from web.calls import Call, Choice
from web.sse import EventStream

KEEP_ALIVE = b": keep-alive\n\n"


class Pace:
    """``interval``: new tokens that a choice has to have before it is told of again, but for its first and its last
    ones. ``keep_alive_s``: how long a stream may be silent; 0: for ever."""

    def __init__(self, interval: int = 1, keep_alive_s: float = 0.0) -> None:
        self._interval = interval
        self._keep_alive_s = keep_alive_s
        self._told: dict[int, int] = {}

    async def changes(self, call: Call, events: EventStream) -> Sequence[Choice]:
        """:meth:`Call.changes`, with comments in between."""
        if not self._keep_alive_s:
            return await call.changes()
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    return await call.changes()
            except TimeoutError:
                await events.write(KEEP_ALIVE)

    def due(self, changed: Sequence[Choice]) -> Sequence[Choice]:
        """Those that are to be told of now; what the others have stays with them."""
        if self._interval == 1:
            return changed
        due = [choice for choice in changed if self._is_due(choice)]
        self._told.update({choice.index: choice.num_tokens for choice in due})
        return due

    def _is_due(self, choice: Choice) -> bool:
        told = self._told.get(choice.index, 0)
        return not told or choice.finish_reason is not None or choice.num_tokens - told >= self._interval
