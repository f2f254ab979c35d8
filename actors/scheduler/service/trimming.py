"""Deletes what everybody has read, or nobody will: the scheduler keeps the log streams of steps and results short.

Recorders and benchmarks read the streams of living replicas too and are not asked. So what may go stays for one more
round, and who is behind for a moment misses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.service.membership import Membership
from pagebus.bus.contract import START, Bus, EntryId
from pagebus.bus.streams import Names

AGAIN_ROUNDS = 30
"""After so many rounds all is trimmed once more: a scheduler that was frozen as it was replaced may still write a plan
for an executor, or a note in the journal, where this one has written nothing and so has not shut it out."""


class Trimmer:
    """Remembers what has been trimmed, so that an idle deployment is left in peace."""

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
        """What had been trimmed may be there again."""
        self._done.clear()

    def replica_lost(self, replica: str, last_step: int) -> None:
        """No executor will want the replica's plans up to ``last_step`` any more."""
        self._last_steps[replica] = last_step

    def forget(self, replica: str) -> None:
        """The streams of a replica that is gone are deleted."""
        self._last_steps.pop(replica, None)
        for stream in (self._names.steps(replica), self._names.results(replica)):
            self._done.pop(stream, None)
            self._read.pop(stream, None)

    def detokenizer_lost(self, stream: str, last: EntryId) -> None:
        """Nobody will read ``stream`` up to ``last``, unless a successor does so first."""
        self._unread[stream] = last

    async def trim(self, core: Core, membership: Membership, positions: Mapping[str, EntryId]) -> None:
        """Trim all streams. ``positions``: how far the results of each replica, gone ones too, have been read here.

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
        """A detokenizer that says nothing about a living replica has not found it yet; about one that is gone, it has
        read its last entry."""
        silent = START if replica in core.replicas else own
        told = [positions.get(f"results:{replica}", silent) for positions in membership.positions.values()]
        return min([own, *told])

    async def _trim(self, stream: str, through: EntryId) -> None:
        if through > self._done.get(stream, START):
            await self._bus.trim(stream, through)
            self._done[stream] = through
