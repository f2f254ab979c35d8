"""Retries calls while the bus is away, and logs the outage once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pagebus.actors.runtime.actor import describe
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import BusUnavailable

T = TypeVar("T")

RETRY_S = 0.2


class BusRetry:
    """Of one actor. ``away`` names the tasks of it that wait for the bus.

    Args:
        doing: what does not happen meanwhile, for the log.
        on_away: called whenever the bus has not taken something.
    """

    def __init__(self, log: Log, *, doing: str = "", on_away: Callable[[], None] = lambda: None) -> None:
        self.away: set[str] = set()
        self._log = log
        self._text = "bus unavailable" + (doing and f": {doing}")
        self._on_away = on_away

    async def until_taken(self, call: Callable[[], Awaitable[T]], task: str = "") -> T:
        """The result of ``call``, once the bus takes it. It may be called many times: a repeat must be harmless."""
        while True:
            try:
                result = await call()
            except BusUnavailable as error:
                await self.pause(error, task)
            else:
                self.back(task)
                return result

    async def for_ever(self, call: Callable[[], Awaitable[object]], task: str = "") -> None:
        """``call`` again and again, each time until the bus takes it."""
        while True:
            await self.until_taken(call, task)

    async def pause(self, error: BusUnavailable, task: str = "") -> None:
        """The bus has not taken what ``task`` gave it: wait a moment before the next try."""
        if not self.away:
            self._log.warning(self._text, error=describe(error))
        self.away.add(task)
        self._on_away()
        await asyncio.sleep(RETRY_S)

    def back(self, task: str = "") -> None:
        """The bus has taken what ``task`` gave it."""
        self.away.discard(task)
