"""The mailbox of an ingress, ``replies:<name>@<epoch>``, which exists only while its owner renews it.

Messages to a mailbox that does not exist are dropped, so nothing accumulates for dead ingresses. A mailbox that may
have been lost, with the bus or by expiry, is opened anew. Its owner must then ask for all replies again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import START, Bus, BusUnavailable, Entry, EntryId

READ_COUNT = 256
READ_BLOCK_MS = 1000
TRIM_EVERY = 256
"""Entries after which the mailbox is trimmed although requests are open."""
TTL_S = 30
"""Seconds that a mailbox outlives its last renewal; longer than most outages of the bus."""


class Mailbox:
    """``on_reopened`` is called when the mailbox exists again and earlier messages may be lost."""

    def __init__(self, bus: Bus, stream: str, log: Log, on_reopened: Callable[[], None]) -> None:
        self._bus = bus
        self._stream = stream
        self._log = log
        self._on_reopened = on_reopened
        self._position: EntryId = START
        self._untrimmed = 0
        self._is_open = asyncio.Event()
        self._num_closed = 0
        self._doubt = asyncio.Event()

    # -- its life -----------------------------------------------------------------------------------------------------

    async def keep_for_ever(self) -> None:
        """Keep the mailbox open until cancelled."""
        bus_retry = BusRetry(self._log, doing="the mailbox is not kept")
        while True:
            await bus_retry.until_taken(self.keep)
            with suppress(TimeoutError):
                async with asyncio.timeout(TTL_S / 4):
                    await self._doubt.wait()

    async def keep(self) -> None:
        """Renew the mailbox, or open it anew."""
        self._doubt.clear()
        if self._is_open.is_set() and await self._bus.keep_mailbox(self._stream, ttl_s=TTL_S):
            return
        self._close()
        num_closed = self._num_closed
        position = await self._bus.open_mailbox(self._stream, ttl_s=TTL_S)
        if self._num_closed == num_closed:  # else the bus was started anew meanwhile
            self._position = position
            self._is_open.set()
            self._on_reopened()

    def doubt(self, *, lost: bool = False) -> None:
        """Note that the mailbox may have expired or, if ``lost``, that its content may be gone although it exists."""
        if lost:
            self._close()
        self._doubt.set()

    def _close(self) -> None:
        """Stop reading until it has been reopened: there may be a gap before it."""
        self._is_open.clear()
        self._num_closed += 1

    async def forget(self) -> None:
        """Delete the mailbox, if the bus is available: it has no reader any more."""
        with suppress(BusUnavailable):
            await self._bus.delete(self._stream)

    # -- what is in it ------------------------------------------------------------------------------------------------

    async def read(self) -> list[Entry]:
        """Wait a second for something new, once it is open."""
        await self._is_open.wait()
        num_closed = self._num_closed
        entries = await self._bus.read({self._stream: self._position}, count=READ_COUNT, block_ms=READ_BLOCK_MS)
        if self._num_closed != num_closed:
            return []
        if entries:
            self._position = entries[-1].id
            self._untrimmed += len(entries)
        return entries

    async def trim(self, *, idle: bool) -> None:
        """Delete the entries that have been read: now and then under load, at once when idle."""
        if self._untrimmed and (self._untrimmed >= TRIM_EVERY or idle):
            await self._bus.trim(self._stream, self._position)
            self._untrimmed = 0
