"""Waiting for what actors do in their own time, and have no event for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.contract import Bus

LIMIT_S = 60.0
"""So that what never happens fails where it was waited for."""


async def until(condition: Callable[[], object], *, look_s: float = 0.002) -> None:
    """Until ``condition`` holds, which is looked at every ``look_s``."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(look_s)


async def until_empty(bus: Bus, stream: str) -> None:
    """Until nothing of a stream is left."""
    async with asyncio.timeout(LIMIT_S):
        while await bus.length(stream):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
