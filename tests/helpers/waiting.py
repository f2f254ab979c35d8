"""Waiting for what actors do in their own time, and have no event for; and how long anything is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pagebus.bus.contract import Bus

LIMIT_S = 600.0
"""The longest that anything is waited for. It ends what hangs, where it was waited for, and says nothing of speed: with
twenty busy processes on two cores all takes ten times as long."""
LIMIT_MS = 1000 * LIMIT_S
TEST_LIMIT_S = 3600
"""Of a whole test, as in pyproject.toml. Those that are told how much to try add to it."""


async def until(condition: Callable[[], object], *, look_s: float = 0.002) -> None:
    """Until ``condition`` holds, which is looked at every ``look_s``."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(look_s)


async def eventually(holds: Callable[[], Awaitable[object]], *, look_s: float = 0.01) -> None:
    """Until ``holds`` says so, which is asked every ``look_s``."""
    async with asyncio.timeout(LIMIT_S):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(look_s)


async def until_empty(bus: Bus, *streams: str) -> None:
    """Until nothing of these streams is left."""
    async with asyncio.timeout(LIMIT_S):
        for stream in streams:
            while await bus.length(stream):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
