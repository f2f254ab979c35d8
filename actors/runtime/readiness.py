"""Readiness of a starting deployment, and its progress until then."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Sequence

from pagebus.actors.runtime.health_check import address_of, http_status
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.progress import READY, Progress, summary
from pagebus.bus.contract import LeaseInfo

Address = tuple[str, int]
PATIENCE = 2
"""Lives of a lease after which its holder certainly lives."""


def of_processes(leases: Iterable[LeaseInfo], pids: Collection[int | None]) -> list[LeaseInfo]:
    """The leases that processes of this machine hold."""
    here = socket.gethostname()
    return [lease for lease in leases if lease.info.get("host") == here and lease.info.get("pid") in pids]


class Rivals:
    """Finds others that hold the leases of our actors. Those of an earlier life of ours end by themselves, and so do
    those of actors that drain.

    Args:
        names: of our actors.
    """

    def __init__(self, names: Collection[str], lease_ttl_s: float, clock: Callable[[], float]) -> None:
        self._names = names
        self._patience_s = PATIENCE * lease_ttl_s
        self._clock = clock
        self._since_s: dict[tuple[str, str, int], float] = {}

    def look(self, leases: Iterable[LeaseInfo], own: Collection[LeaseInfo]) -> LeaseInfo | None:
        """A lease that another one keeps."""
        now, kept = self._clock(), {}
        for lease in leases:
            if lease in own or lease.info.get("actor") not in self._names or lease.info.get("state") == "draining":
                continue
            key = (lease.kind, lease.name, lease.epoch)
            kept[key] = self._since_s.get(key, now)
            if now - kept[key] > self._patience_s:
                return lease
        self._since_s = kept
        return None


async def where_it_answers(settings: Settings, leases: Sequence[LeaseInfo], progress: Progress) -> list[Address]:
    """Host and port of each ingress, once all are ready; before that none, and ``progress`` shows what is missing."""
    phase, share = summary([lease.info for lease in leases if lease.kind == "executor"], settings.executors)
    addresses = ingress_addresses(settings, leases)
    if phase != READY:
        progress.show(phase, share)
    elif len(addresses) >= settings.counts["ingress"] and await _all_answer(addresses):
        return addresses
    else:
        progress.show("waiting for the other actors", None)
    return []


def ingress_addresses(settings: Settings, leases: Iterable[LeaseInfo]) -> list[Address]:
    """Addresses of the ready ingresses: from their leases, else from the settings."""
    found = []
    for lease in leases:
        host, usual = address_of(settings)
        port = lease.info.get("port", usual)
        if lease.kind == "ingress" and isinstance(port, int) and (port or settings.uds):
            found.append((host, port))
    return found


async def _all_answer(addresses: Iterable[Address]) -> bool:
    return all([await http_status(host, port, "/health") == 200 for host, port in addresses])
