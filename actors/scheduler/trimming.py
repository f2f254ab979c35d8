"""Deletes what everybody has read, or nobody will: the scheduler keeps the log streams of steps and results short, and
drops the mailboxes of dead ingresses.

Recorders and benchmarks read the streams of living replicas too and are not asked. So what may go stays for one more
round, and who is behind for a moment misses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from actors.scheduler.core import Core
from actors.scheduler.membership import Membership
from bus.contract import START, Bus, EntryId
from bus.streams import Names

SENT_LATE_S = 30.0
"""How long something may still be sent to an ingress that is gone."""


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
        self._dead_until_s: dict[str, float] = {}
        """Addresses of dead ingresses, and until when (monotonic) something may still be sent there."""

    def bus_restarted(self) -> None:
        """What had been trimmed may be there again."""
        self._done.clear()

    def replica_lost(self, replica: str, last_step: int) -> None:
        """No executor will want the replica's plans up to ``last_step`` any more."""
        self._last_steps[replica] = last_step

    def detokenizer_lost(self, stream: str, last: EntryId) -> None:
        """Nobody will read ``stream`` up to ``last``, unless a successor does so first."""
        self._unread[stream] = last

    async def trim(self, core: Core, membership: Membership, positions: Mapping[str, EntryId]) -> None:
        """Trim all streams. ``positions``: how far the results of each replica, gone ones too, have been read here.

        Raises:
            BusUnavailable: some may have been trimmed.
        """
        for replica, own in positions.items():
            landed = self._last_steps.get(replica, 0)
            if replica in core.replicas:
                landed = max(landed, core.replicas[replica].landing.landed)
            read = {
                self._names.steps(replica): EntryId(self._epoch, landed),
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

    @property
    def dead_ingresses(self) -> Iterable[str]:
        """Addresses whose mailboxes are still deleted now and then."""
        return self._dead_until_s.keys()

    async def delete_mailboxes(self, gone: Iterable[str]) -> None:
        """Delete those of ingresses that are gone, addresses, and again for a while: who has not heard of the death
        still sends there.

        Raises:
            BusUnavailable: they are deleted with the next ones.
        """
        now_s = time.monotonic()
        self._dead_until_s.update(dict.fromkeys(gone, now_s + SENT_LATE_S))
        if self._dead_until_s:
            await self._bus.delete(*map(self._names.replies, self._dead_until_s))
            self._dead_until_s = {
                address: until_s for address, until_s in self._dead_until_s.items() if now_s < until_s
            }

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
