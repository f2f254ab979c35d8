"""A bus through which some executors cannot be seen: where requests run is then certain until they may join."""

from __future__ import annotations

from pagebus.bus.contract import LeaseInfo
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names


class Curtain(RedisBus):
    """Whoever is in ``hidden`` has no lease for those who look through it."""

    def __init__(self, url: str, hidden: set[str], names: Names | None = None) -> None:
        super().__init__(url, names)
        self._hidden = hidden

    async def leases(self, kind: str | None = None) -> list[LeaseInfo]:
        """As of any bus, without those."""
        return [lease for lease in await super().leases(kind) if lease.name not in self._hidden]
