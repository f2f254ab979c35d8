"""Requests that take long to encode are processed one at a time, beside all others; clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from pagebus.bus.contract import Entry


class Heavy:
    """Entries that wait to be encoded, by client.

    Args:
        process: processes one entry.
    """

    def __init__(self, process: Callable[[Entry], Awaitable[None]]) -> None:
        self._process = process
        self._waiting: dict[str, deque[Entry]] = {}
        self._is_running = False

    def add(self, entry: Entry) -> bool:
        """Add an entry; returns whether :meth:`run` must be called, because it is not running."""
        self._waiting.setdefault(getattr(entry.message, "client", ""), deque()).append(entry)
        was_running, self._is_running = self._is_running, True
        return not was_running

    async def run(self) -> None:
        """Process entries until none waits."""
        try:
            while self._waiting:
                client, entries = next(iter(self._waiting.items()))
                entry = entries.popleft()
                del self._waiting[client]
                if entries:
                    self._waiting[client] = entries  # behind the others
                await self._process(entry)
        finally:
            self._is_running = False
