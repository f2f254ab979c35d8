"""Readiness of a starting deployment, and its progress until then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagebus.actors.runtime.health_check import address_of, http_status
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.progress import READY, Progress, summary
from pagebus.bus.contract import LeaseInfo

Address = tuple[str, int]


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
