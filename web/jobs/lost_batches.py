"""Queues batches again whose entries are lost: a Redis that came back with less than it had, or a new one.

A batch is in files, which outlive the bus. If no entry of the stream of jobs names it, and no actor shows a sign of
life at it, nobody would ever end it.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Callable, Collection
from functools import partial

from pagebus.actors.runtime.actor import describe
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import START, Bus
from pagebus.bus.messages import BatchQueued
from pagebus.bus.streams import Names
from pagebus.web.jobs.window import READ_COUNT
from pagebus.web.storage.files import OVER, Store

SILENCE_S = 10.0
"""How long a batch without an entry must show no sign of life; whoever works on it shows one each second."""
PAGE = READ_COUNT
"""Entries that are read together: jobs among them may be long."""


class LostBatches:
    """Finds lost batches of a deployment once there is reason to. ``running`` are the ids of those under way here."""

    def __init__(self, bus: Bus, names: Names, store: Store, running: Callable[[], Collection[str]], log: Log) -> None:
        self._bus, self._names, self._store, self._running, self._log = bus, names, store, running, log
        self._bus_retry = BusRetry(log, doing="lost batches are not looked for")
        self._doubted = asyncio.Event()
        self._doubted.set()

    def doubt(self) -> None:
        """The server may have lost entries."""
        self._doubted.set()

    async def run(self) -> None:
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            try:
                await self.look()
            except OSError as error:  # a disk that is full, or away
                self._log.error("lost batches were not looked for", error=describe(error))
                self._doubted.set()
                await asyncio.sleep(SILENCE_S)

    async def look(self) -> None:
        """Queue again what shows no sign of life for SILENCE_S."""
        if before := await asyncio.to_thread(self._store.signs_of_life, self._names.deployment):
            await asyncio.sleep(SILENCE_S)
            await self._bus_retry.until_taken(partial(self._queue_again, before))

    async def _queue_again(self, before: dict[str, tuple[int, ...]]) -> None:
        """Of several actors one at a time does this, so that the next finds the new entries."""
        with self._store.lock.open("w") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            now = await asyncio.to_thread(self._store.signs_of_life, self._names.deployment)
            silent = {each for each, sign in now.items() if before.get(each) == sign} - set(self._running())
            if not silent:
                return
            missing = silent - await self._queued()
            for batch_id in sorted(missing):  # one that is over may have had its entry until now
                record = await asyncio.to_thread(self._store.find, batch_id)
                if record is not None and record["status"] not in OVER:
                    self._log.warning("a batch without an entry is queued again", id=batch_id)
                    await self._bus.publish([(self._names.jobs, BatchQueued(batch_id=batch_id))])

    async def _queued(self) -> set[str]:
        """Ids of all batches that entries name, read or not."""
        found, position = set[str](), START
        while entries := await self._bus.read({self._names.jobs: position}, count=PAGE, block_ms=0):
            position = entries[-1].id
            found |= {each.message.batch_id for each in entries if isinstance(each.message, BatchQueued)}
        return found
