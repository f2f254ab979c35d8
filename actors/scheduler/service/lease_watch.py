"""Looking at the leases again and again, and not believing every absence.

After an outage of the bus, or of this process (a new scheduler was away until now), or a jump of the clock of Redis,
which has all leases expire, actors get the time of a lease to show that they live.

A server of the bus that comes back with less than it had may have forgotten who was given up, or who leads. Who was, or
leads no more, may then take its lease back; so what the server forgets is remembered here, and by those who are led.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from pagebus.actors.scheduler.service.membership import Membership, positions_of
from pagebus.bus.contract import FENCE_INDEX, START, Bus, EntryId, Fenced, LeaseInfo

LOOK_S = 0.25


class LeaseWatch:
    """Tells the membership who is there, and revokes the leases of those who are believed to be gone."""

    def __init__(self, bus: Bus, membership: Membership, lease_ttl_s: float) -> None:
        self.looked_s = time.monotonic()
        """When the last look was taken, by the monotonic clock."""
        self._bus = bus
        self._membership = membership
        self._lease_ttl_s = lease_ttl_s
        self._revoked: dict[tuple[str, str], int] = {}
        """By kind and name, the epoch below which nobody is taken for alive any more."""
        self.doubt()

    def doubt(self) -> None:
        """Who seems to be gone from now on may only have been cut off."""
        self._believe_absence_s = time.monotonic() + self._lease_ttl_s

    async def look(self, epoch: int) -> None:
        """One look at all leases. ``epoch`` is that of the scheduler's own: if it is not there, something is wrong
        with all of them.

        Raises:
            Fenced: a later scheduler has led since.
        """
        leases = await self._bus.leases()
        check_leads(leases, epoch)
        late = time.monotonic() - self.looked_s > LOOK_S + self._lease_ttl_s / 3
        if late or not any(lease.epoch == epoch for lease in leases):
            self.doubt()
        self.looked_s = time.monotonic()
        told = [positions_of(lease) for lease in leases if lease.kind == "detokenizer"]
        leases = [lease for lease in leases if not await self._revoke_again(lease, told)]
        revoked = set()
        if self.looked_s >= self._believe_absence_s:
            for kind, name in self._membership.absent(leases):
                if shut_out := await self._bus.revoke_lease(kind, name):
                    self._revoked[kind, name] = shut_out
                    revoked.add((kind, name))
        self._membership.look(leases, revoked)

    def shut_out(self, kind: str, name: str, epoch: int) -> None:
        """Its holder of this epoch has been given up, though not by :meth:`look`."""
        self._revoked[kind, name] = epoch + 1

    async def _revoke_again(self, lease: LeaseInfo, told: Iterable[Mapping[str, EntryId]]) -> bool:
        """Whether its holder was given up, which the bus must have forgotten: here, or, as detokenizers that have read
        the end of its results tell, by an earlier scheduler. They would not read what it writes after that."""
        below = self._revoked.get((lease.kind, lease.name), 0)
        end = EntryId(lease.epoch, FENCE_INDEX)
        if lease.kind == "executor" and any(each.get(f"results:{lease.name}", START) >= end for each in told):
            below = lease.epoch + 1
        if lease.epoch >= below:
            return False
        await self._bus.revoke_lease(lease.kind, lease.name, below=below)
        return True


def check_leads(leases: Iterable[LeaseInfo], epoch: int) -> None:
    """Has nobody heard of a scheduler after this one, of ``epoch``? They do not listen to it any more.

    Raises:
        Fenced: somebody has.
    """
    for lease in leases:
        heard = lease.info.get("scheduler_epoch")
        if isinstance(heard, int) and heard > epoch:
            raise Fenced(f"{lease.kind} {lease.name!r} has heard of a scheduler of epoch {heard}, after {epoch}")
