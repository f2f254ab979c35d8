"""Ctrl-C ends what is under way, not the program."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any


async def until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work``; False if Ctrl-C has ended it."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait({task})
        if task.cancelled():
            return False
        task.result()
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        task.cancel()
        with contextlib.suppress(BaseException):
            await task
