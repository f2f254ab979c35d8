"""Requests that take long to encode: one at a time, beside all others, and clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from pagebus.bus.contract import Entry


class Heavy:
    """What waits to be encoded, by client.

    Args:
        process: sees one entry through.
    """

    def __init__(self, process: Callable[[Entry], Awaitable[None]]) -> None:
        self._process = process
        self._waiting: dict[str, deque[Entry]] = {}
        self._is_running = False

    def add(self, entry: Entry) -> bool:
        """One more. Whether :meth:`run` is to be called, since it does not run."""
        self._waiting.setdefault(getattr(entry.message, "client", ""), deque()).append(entry)
        was_running, self._is_running = self._is_running, True
        return not was_running

    async def run(self) -> None:
        """Until nothing waits."""
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
