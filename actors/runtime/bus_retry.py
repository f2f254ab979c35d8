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
    """Retries of one actor. ``away`` names its tasks that wait for the bus.

    Args:
        doing: what is suspended meanwhile, for the log.
        on_away: called whenever a call to the bus has failed.
    """

    def __init__(self, log: Log, *, doing: str = "", on_away: Callable[[], None] = lambda: None) -> None:
        self.away: set[str] = set()
        self._log = log
        self._text = "bus unavailable" + (doing and f": {doing}")
        self._on_away = on_away

    async def until_taken(self, call: Callable[[], Awaitable[T]], task: str = "") -> T:
        """Call until the bus accepts it, and return the result. Repeats must be harmless."""
        while True:
            try:
                result = await call()
            except BusUnavailable as error:
                await self.pause(error, task)
            else:
                self.back(task)
                return result

    async def for_ever(self, call: Callable[[], Awaitable[object]], task: str = "") -> None:
        """Repeat ``call`` forever, each time until the bus accepts it."""
        while True:
            await self.until_taken(call, task)

    async def pause(self, error: BusUnavailable, task: str = "") -> None:
        """Note that the bus rejected a call of ``task``, and wait before the next try."""
        if not self.away:
            self._log.warning(self._text, error=describe(error))
        self.away.add(task)
        self._on_away()
        await asyncio.sleep(RETRY_S)

    def back(self, task: str = "") -> None:
        """Note that the bus accepted a call of ``task``."""
        self.away.discard(task)
