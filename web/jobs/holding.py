"""The entries that a jobs actor is working on, and whether they still belong to it.

When the lease of an actor expires, another takes over its entries. If the first was only frozen or cut off, or the
clock of the bus had jumped, both work on them. A job is answered by whichever finishes first, but only one actor may
write a batch's files.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakSet

from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import Bus, Entry, EntryId
from pagebus.bus.streams import JOBS_GROUP


class Holding:
    """Entries of the stream of jobs, from when they are begun until their end is stored."""

    def __init__(self, bus: Bus, stream: str, consumer: str, log: Log) -> None:
        self._bus, self._stream, self._consumer, self._log = bus, stream, consumer, log
        self._entries: set[EntryId] = set()
        self._running: dict[asyncio.Task[Any], tuple[EntryId, str]] = {}
        """The entry and the name of the batch, by task."""
        self._num_lapses = self._num_checked = 0
        """How often the lease has expired, and how many of these expirations a check of the bus has covered."""
        self._let_go: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._doubtful_until_s = -math.inf
        """Until when an actor that saw the expiry may still take something over."""
        self._nowhere = set[EntryId]()
        """Entries under way that the last check has found to be pending nowhere."""

    def __contains__(self, entry_id: EntryId) -> bool:
        return entry_id in self._entries

    def begin(self, entries: Iterable[Entry]) -> list[Entry]:
        """Begin entries; returns those that are not under way already. An entry that another actor had taken over may
        come back, because that actor has died, although it never ended here."""
        new = [entry for entry in entries if entry.id not in self._entries]
        self._entries.update(entry.id for entry in new)
        return new

    def ended(self, entry_id: EntryId) -> None:
        """Note that the end of an entry is stored."""
        self._entries.discard(entry_id)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def work(self, entry: Entry, batch: str) -> None:
        """Register the current task as working on an entry. Tasks that are not registered are not cancelled."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = entry.id, batch
        task.add_done_callback(self._running.pop)

    @property
    def lets_go(self) -> bool:
        """Whether the current task is cancelled because another actor has its entry. Before it notices that, the entry
        may have come back and have been begun once more."""
        return asyncio.current_task() in self._let_go

    @property
    def batches(self) -> set[str]:
        """Names of the batches under way."""
        return {batch for _, batch in self._running.values()}

    def cancel(self, batches: Collection[str]) -> None:
        """Cancel the tasks of these batches."""
        for task, (_, batch) in list(self._running.items()):
            if batch in batches:
                task.cancel()

    async def stop(self) -> None:
        """Cancel all tasks."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what others have ---------------------------------------------------------------------------------------------

    def lapsed(self, ttl_s: float) -> None:
        """Note that the lease had expired, or that the server may have come back with earlier owners: others may
        take entries over for ``ttl_s`` from now on."""
        self._num_lapses += 1
        self._doubtful_until_s = asyncio.get_running_loop().time() + ttl_s

    async def look(self, *, anew: bool = False) -> None:
        """Release entries that others have taken over, if the lease had expired since the last check; ``anew`` checks
        again after a while. An entry pending nowhere is kept, as it may have been lost with the bus.

        Raises:
            BusUnavailable: it has to be looked again.
        """
        is_doubtful = anew and asyncio.get_running_loop().time() < self._doubtful_until_s
        num_lapses = self._num_lapses
        if self._num_checked == num_lapses and not is_doubtful:
            return
        running = [entry_id for entry_id, _ in self._running.values()]
        found = await self._bus.holders(self._stream, JOBS_GROUP, running)
        self._num_checked = max(self._num_checked, num_lapses)
        self._nowhere = set(running) - found.keys()
        self.let_go({entry_id for entry_id, holder in found.items() if holder != self._consumer})

    def is_nowhere(self, entry_id: EntryId) -> bool:
        """Whether an entry is pending nowhere: it was lost with the bus, or another actor has ended it."""
        return entry_id in self._nowhere

    def let_go(self, taken: Collection[EntryId]) -> None:
        """Release entries that others have, or have ended."""
        for task, (entry_id, _) in list(self._running.items()):
            if entry_id in taken:
                self._log.warning("let go of what another actor has taken over", entry=str(entry_id))
                self._let_go.add(task)
                task.cancel()
        self._entries.difference_update(taken)
        self._bus.let_go(self._stream, JOBS_GROUP, taken)
