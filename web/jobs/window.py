"""How much is taken on at a time: so that a hundred thousand queued jobs cost an actor no more than a few hundred."""

from __future__ import annotations

import asyncio
from contextlib import suppress

MAX_WINDOW_BYTES = 64 * 2**20
"""Of all requests under way; one that is larger goes alone."""
READ_COUNT = 64


class Window:
    """Jobs under way, at most ``max_jobs`` of them."""

    def __init__(self, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self.jobs = 0
        self.bytes = 0
        self._freed = asyncio.Event()

    def room(self) -> int:
        """How many jobs may be taken on now."""
        return max(0, min(self.max_jobs - self.jobs, READ_COUNT)) if self.bytes < MAX_WINDOW_BYTES else 0

    def enter(self, size: int) -> None:
        self.jobs += 1
        self.bytes += size

    def leave(self, size: int) -> None:
        self.jobs -= 1
        self.bytes -= size
        self._freed.set()

    async def freed(self, timeout_s: float) -> None:
        """Wait until something has left, at most so long."""
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._freed.wait()
