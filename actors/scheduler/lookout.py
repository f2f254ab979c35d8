"""Looking at the leases again and again, and not believing every absence.

After an outage of the bus, or of this process (a new scheduler was away until now), or a jump of the clock of Redis,
which has all leases expire, actors get the time of a lease to show that they live.
"""

from __future__ import annotations

import time

from actors.scheduler.membership import Membership
from bus.contract import Bus

LOOK_S = 0.25


class Lookout:
    """Tells the membership who is there, and revokes the leases of those who are believed to be gone."""

    def __init__(self, bus: Bus, membership: Membership, lease_ttl_s: float) -> None:
        self.looked_s = time.monotonic()
        """When the last look was taken, by the monotonic clock."""
        self._bus = bus
        self._membership = membership
        self._lease_ttl_s = lease_ttl_s
        self.doubt()

    def doubt(self) -> None:
        """Who seems to be gone from now on may only have been cut off."""
        self._believe_absence_s = time.monotonic() + self._lease_ttl_s

    async def look(self, epoch: int) -> None:
        """One look at all leases. ``epoch`` is that of the scheduler's own: if it is not there, something is wrong
        with all of them."""
        leases = await self._bus.leases()
        late = time.monotonic() - self.looked_s > LOOK_S + self._lease_ttl_s / 3
        if late or not any(lease.epoch == epoch for lease in leases):
            self.doubt()
        self.looked_s = time.monotonic()
        revoked = set()
        if self.looked_s >= self._believe_absence_s:
            for kind, name in self._membership.absent(leases):
                if await self._bus.revoke_lease(kind, name):
                    revoked.add((kind, name))
        self._membership.look(leases, revoked)
