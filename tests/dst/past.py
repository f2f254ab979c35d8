"""What a server of the bus had stored at some moment, to come back with: its file or its replica is behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from pagebus.bus.memory.server import Group, MemoryServer, MemoryStream


class Past:
    """``server`` as it is now; None: an empty one. Ids and epochs follow the clock, so they go on."""

    def __init__(self, server: MemoryServer | None) -> None:
        self._held = _copied(server or MemoryServer())

    def restore(self, server: MemoryServer) -> None:
        """Whatever has been stored since is lost."""
        for name, value in self._held.items():
            setattr(server, name, value)


def _copied(server: MemoryServer) -> dict[str, Any]:
    return {
        "streams": {name: _copied_stream(stream) for name, stream in server.streams.items()},
        "expiries": dict(server.expiries),
        "leases": {key: replace(lease) for key, lease in server.leases.items()},
        "granted": dict(server.granted),
        "states": dict(server.states),
        "tables": {key: dict(rows) for key, rows in server.tables.items()},
        "counters": {key: Counter(counts) for key, counts in server.counters.items()},
    }


def _copied_stream(stream: MemoryStream) -> MemoryStream:
    groups = {
        name: Group(group.delivered, {at: replace(each) for at, each in group.pending.items()}, dict(group.consumers))
        for name, group in stream.groups.items()
    }
    return MemoryStream(list(stream.ids), dict(stream.fields), stream.last, groups)
