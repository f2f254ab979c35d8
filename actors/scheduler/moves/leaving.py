"""Replicas whose executors drain: their sequences continue elsewhere, and pull their blocks meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence


@dataclass(slots=True)
class Leaving:
    """By replica, the sequences that have left it and have no other slot yet."""

    _moved: dict[str, list[Sequence]] = field(default_factory=dict)

    def begin(self, replica: Replica, moved: list[Sequence]) -> None:
        """A replica begins to leave."""
        self._moved[replica.name] = moved

    def lose(self, name: str) -> None:
        """A replica has left."""
        self._moved.pop(name, None)

    def ready(self, replicas: dict[str, Replica], pulls: Pulls) -> list[Replica]:
        """The replicas whose executors may end, which are then forgotten here: they have no steps in flight, no pull
        reads from them, and no sequence that left them still waits for a slot from which it could pull."""
        found = []
        for name in list(self._moved):
            replica = replicas[name]
            queued = [each for each in self._moved[name] if each.is_queued]
            wanted = queued if any(pulls.can_lend(replica, each) for each in replicas.values()) else []
            self._moved[name] = queued
            if not (replica.in_flight or wanted or pulls.lent(replica)):
                del self._moved[name]
                found.append(replica)
        return found
