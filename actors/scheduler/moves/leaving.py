"""Replicas whose executors drain: their sequences go on elsewhere, with blocks that are pulled from them meanwhile."""

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
        """The replicas whose executors may end, which are forgotten here: nothing of theirs is in flight, nobody pulls
        from them, and nobody will who could."""
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
