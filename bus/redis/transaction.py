"""Optimistic transactions, which apply only if the data they build on has not changed: WATCH, read, MULTI ... EXEC.

There are no scripts, because the Redis users of actors may not run any. Between the read and the transaction no other
command may use the connection. Transactions therefore have a connection of their own, and a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pagebus.bus.redis.link import Command, RedisLink
from pagebus.bus.redis.replies import checked
from pagebus.bus.redis.stream import Reply


class RedisTransaction:
    """A connection for transactions: :meth:`watch`, then optionally :meth:`exec`, holding the ``lock``."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self.lock = asyncio.Lock()
        self._generation = 0

    async def watch(self, keys: Sequence[str], *commands: Command) -> list[Reply]:
        """Watch these keys, and only these; returns the replies to ``commands``."""
        unwatched, watched, *replies = await self._link.call(("UNWATCH",), ("WATCH", *keys), *commands)
        checked(unwatched, "unwatch")
        checked(watched, "watch")
        self._generation = self._link.generation
        return replies

    async def exec(self, commands: Sequence[Command]) -> list[Reply]:
        """Run the commands if no watched key has changed. Returns the replies to MULTI, the commands and EXEC; the last
        is None if a key has changed, and then nothing was applied. Fails on any connection but the one that watches.

        Raises:
            BusUnavailable: that is lost.
        """
        return await self._link.call(("MULTI",), *commands, ("EXEC",), generation=self._generation)
