"""Limits the jobs taken on at once, so that a hundred thousand queued jobs cost an actor no more than a few hundred.

Owners share the window by their weights: while several wait, free room goes to the one that holds least for its weight.
An owner alone may use the whole window.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

MAX_WINDOW_BYTES = 64 * 2**20
"""The most bytes of all requests under way; a larger one goes alone."""
READ_COUNT = 64


class Owner(NamedTuple):
    """The owner of jobs: the name of a key ("" where none is needed), and its weight."""

    name: str | None
    weight: float = 1.0


STREAM = Owner(None)
"""The owner of jobs that other programs queue."""


class Window:
    """Jobs under way, at most ``max_jobs`` of them."""

    def __init__(self, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self.jobs = 0
        self.bytes = 0
        self._held: Counter[str | None] = Counter()
        self._waiting: Counter[Owner] = Counter()
        self._freed = asyncio.Event()

    def room(self, owner: Owner = STREAM) -> int:
        """The number of jobs of this owner that may be taken on now: none while another owner waits that holds less."""
        if self._is_full or any(self._after(other) < self._after(owner) for other in self._waiting):
            return 0
        return min(self.max_jobs - self.jobs, READ_COUNT)

    def resize(self, max_jobs: int) -> None:
        """Take up to ``max_jobs`` from now on."""
        self.max_jobs = max_jobs

    def enter(self, size: int, owner: Owner = STREAM) -> None:
        self.jobs += 1
        self.bytes += size
        self._held[owner.name] += 1
        self.look_again()

    def leave(self, size: int, owner: Owner = STREAM) -> None:
        self.jobs -= 1
        self.bytes -= size
        self._held[owner.name] -= 1
        if not self._held[owner.name]:
            del self._held[owner.name]
        self._freed.set()

    async def freed(self, timeout_s: float, owner: Owner | None = None) -> None:
        """Wait until there may be room, with a timeout. Meanwhile room is kept from those that hold more than
        ``owner``, if one is given."""
        self._freed.clear()
        if owner is not None:
            self._waiting[owner] += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._freed.wait()
        finally:
            if owner is not None:
                self._waiting[owner] -= 1
                if not self._waiting[owner]:
                    del self._waiting[owner]

    def look_again(self) -> None:
        """Wake owners that found no room before."""
        if self._waiting and not self._is_full:
            self._freed.set()

    @property
    def is_wanted(self) -> bool:
        """Whether an owner waits."""
        return bool(self._waiting)

    @property
    def _is_full(self) -> bool:
        return self.jobs >= self.max_jobs or self.bytes >= MAX_WINDOW_BYTES

    def _after(self, owner: Owner) -> float:
        """What it would hold in proportion to its weight, with one more."""
        return (self._held[owner.name] + 1) / owner.weight
