"""Waiting for tasks and events of an event loop, and ending tasks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


async def set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, at most ``timeout_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Wait until the task is done or the event is set."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(waiter)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until all have ended; their errors have been reported elsewhere."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
