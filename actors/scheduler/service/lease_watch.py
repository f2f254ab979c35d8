"""The lease watch: looks at all leases repeatedly, and decides which absences to believe.

Actors get the time of a lease to show that they live after an outage of the bus or of this process, at the start of a
scheduler, and after a jump of the clock of Redis, which expires all leases.

A Redis server restored from older data may have lost revocations. A former leader or a revoked actor can then take its
lease back. So the lease watch keeps its own record of revocations, and actors remember the latest scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from pagebus.actors.scheduler.service.membership import Membership, positions_of
from pagebus.bus.contract import FENCE_INDEX, START, Bus, EntryId, Fenced, LeaseInfo

LOOK_S = 0.25


class LeaseWatch:
    """Passes the live leases to the membership, and revokes leases of actors believed to be gone."""

    def __init__(self, bus: Bus, membership: Membership, lease_ttl_s: float) -> None:
        self.looked_s = time.monotonic()
        """Time of the last look, by the monotonic clock."""
        self._bus = bus
        self._membership = membership
        self._lease_ttl_s = lease_ttl_s
        self._revoked: dict[tuple[str, str], int] = {}
        """By kind and name, the epoch below which no holder counts as alive."""
        self.doubt()

    def doubt(self) -> None:
        """Disbelieve absences for the time of one lease: the actors may only have been cut off."""
        self._believe_absence_s = time.monotonic() + self._lease_ttl_s

    async def look(self, epoch: int) -> None:
        """Look at all leases once. If the scheduler's own lease, of ``epoch``, is missing, absences are not believed.

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
        """Record that the holder of this epoch was given up by other means than :meth:`look`."""
        self._revoked[kind, name] = epoch + 1

    async def _revoke_again(self, lease: LeaseInfo, told: Iterable[Mapping[str, EntryId]]) -> bool:
        """Revoke a lease whose holder was given up before, which the bus must have lost. Returns whether it was.

        The record is this scheduler's own, or comes from detokenizers that have read the end of the executor's results,
        as written by an earlier scheduler. They would not read later results of that executor.
        """
        below = self._revoked.get((lease.kind, lease.name), 0)
        end = EntryId(lease.epoch, FENCE_INDEX)
        if lease.kind == "executor" and any(each.get(f"results:{lease.name}", START) >= end for each in told):
            below = lease.epoch + 1
        if lease.epoch >= below:
            return False
        await self._bus.revoke_lease(lease.kind, lease.name, below=below)
        return True


def check_leads(leases: Iterable[LeaseInfo], epoch: int) -> None:
    """Check that no actor has heard of a scheduler after the one of ``epoch``; it would ignore the earlier one.

    Raises:
        Fenced: one has.
    """
    for lease in leases:
        heard = lease.info.get("scheduler_epoch")
        if isinstance(heard, int) and heard > epoch:
            raise Fenced(f"{lease.kind} {lease.name!r} has heard of a scheduler of epoch {heard}, after {epoch}")
