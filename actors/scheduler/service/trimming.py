"""Trims the streams of steps and results, once all their readers have read them.

Recorders and benchmarks read the streams of living replicas too, and are not consulted. So entries stay for one more
round, and a reader that is briefly behind misses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.service.membership import Membership
from pagebus.bus.contract import START, Bus, EntryId
from pagebus.bus.streams import Names

AGAIN_ROUNDS = 30
"""All streams are trimmed again after this many rounds. A scheduler frozen while it was replaced may still write a plan
or a journal entry, where this one has written nothing and so has not shut it out."""


class Trimmer:
    """Remembers positions already trimmed, so that an idle deployment causes no traffic."""

    def __init__(self, bus: Bus, names: Names, epoch: int) -> None:
        self._bus = bus
        self._names = names
        self._epoch = epoch
        self._done: dict[str, EntryId] = {}
        self._read: dict[str, EntryId] = {}
        self._last_steps: dict[str, int] = {}
        self._unread: dict[str, EntryId] = {}
        self._rounds = 0

    def bus_restarted(self) -> None:
        """Forget positions: trimmed entries may be back."""
        self._done.clear()

    def replica_lost(self, replica: str, last_step: int) -> None:
        """Note that no executor needs the replica's plans up to ``last_step``."""
        self._last_steps[replica] = last_step

    def forget(self, replica: str) -> None:
        """Drop state about a replica whose streams are deleted."""
        self._last_steps.pop(replica, None)
        for stream in (self._names.steps(replica), self._names.results(replica)):
            self._done.pop(stream, None)
            self._read.pop(stream, None)

    def detokenizer_lost(self, stream: str, last: EntryId) -> None:
        """Note that ``stream`` up to ``last`` has no reader any more, unless a successor reads it first."""
        self._unread[stream] = last

    async def trim(self, core: Core, membership: Membership, positions: Mapping[str, EntryId]) -> None:
        """Trim all streams. ``positions``: how far the results of each replica, including lost ones, have been handled
        here.

        Raises:
            BusUnavailable: some may have been trimmed.
        """
        self._rounds += 1
        if self._rounds % AGAIN_ROUNDS == 0:
            self._done.clear()
        for replica, own in positions.items():
            done = self._last_steps.get(replica, 0)
            if replica in core.replicas:
                done = max(done, core.replicas[replica].step_results.last_step)
            read = {
                self._names.steps(replica): EntryId(self._epoch, done),
                self._names.results(replica): self._read_by_all(replica, own, core, membership),
            }
            for stream, through in read.items():
                before = self._read.get(stream, START)
                self._read[stream] = through
                await self._trim(stream, before if replica in core.replicas else through)
        for stream, last in list(self._unread.items()):
            if not any(stream == self._names.sequences(name) for name in membership.live_detokenizers):
                await self._trim(stream, last)
            self._unread.pop(stream, None)  # a drain, beside the housekeeping, may have been faster

    def _read_by_all(self, replica: str, own: EntryId, core: Core, membership: Membership) -> EntryId:
        """The position that all readers have passed. A detokenizer without a position has not found a living replica
        yet, and has read a lost one to the end."""
        silent = START if replica in core.replicas else own
        told = [positions.get(f"results:{replica}", silent) for positions in membership.positions.values()]
        return min([own, *told])

    async def _trim(self, stream: str, through: EntryId) -> None:
        if through > self._done.get(stream, START):
            await self._bus.trim(stream, through)
            self._done[stream] = through
