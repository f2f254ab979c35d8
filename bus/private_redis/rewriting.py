"""Rewrites the append-only file of a private Redis server after a write error.

Redis 7.0 leaves a hole in the file after such an error (:mod:`pagebus.bus.private_redis.append_only`). All data is
still in memory, so a rewrite makes a later repair unnecessary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagebus.bus.backoff import Backoff

LOOK_S = 1.0
OVER = b"AOF write error looks solved"
"""Redis's log message when it can write again."""
_LOG = logging.getLogger("bus")


class Rewriting:
    """Looks at the server's log, and has the file rewritten.

    Args:
        log_path: the log, of which what is there already is passed over.
        ask: sends a command and gives its answer.
    """

    def __init__(self, log_path: Path, ask: Callable[[str], Awaitable[bytes]]) -> None:
        self._log_path = log_path
        self._ask = ask
        self._position = log_path.stat().st_size if log_path.exists() else 0
        self._due = self._running = False
        self._backoff = Backoff(LOOK_S, 60.0)
        self._next_s = 0.0

    async def look(self) -> None:
        """Check the log, and rewrite the file if needed.

        Raises:
            OSError: the server does not answer.
        """
        if OVER in self._new_lines():
            self._due, self._running, self._next_s = True, False, 0.0
            _LOG.warning("the private Redis server could not write its file for a while; the file is rewritten")
        if not self._due or time.monotonic() < self._next_s:
            return
        state = await self._ask("INFO persistence")
        if b"aof_rewrite_in_progress:1" in state or b"aof_rewrite_scheduled:1" in state:
            return
        if self._running and b"aof_last_bgrewrite_status:ok" in state:
            self._due = self._running = False
            self._backoff.reset()
            _LOG.warning("the private Redis server has rewritten its file")
            return
        if self._running:
            self._next_s = time.monotonic() + self._backoff.next_s()
        self._running = (await self._ask("BGREWRITEAOF")).startswith(b"+")

    def _new_lines(self) -> bytes:
        """Lines logged since the last check, beginning with the last, perhaps partial, line before."""
        with self._log_path.open("rb") as log:
            log.seek(max(self._position - len(OVER) + 1, 0))
            lines = log.read()
            self._position = log.tell()
        return lines
