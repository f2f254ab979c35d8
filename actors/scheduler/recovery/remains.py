"""Deletes the streams of executors and detokenizers that are gone. Where names are used once, as in containers, no
other actor would delete them.

A stream outlives its actor for a while. The actor may come back under its name, others may still read its output, and
the fence at the end of its results refuses its late writes. The list of streams is kept on the bus, so that a later
scheduler knows those whose actors died while there was none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from pagebus.bus.contract import Bus, BusUnavailable
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names

VANISH_ROUNDS = 120
"""Rounds of housekeeping, about one per second, from an actor's end until its streams are deleted."""
UNREAD_ROUNDS = 5 * VANISH_ROUNDS
"""The same for results that not all readers have read."""
STATE = "streams"
REMEMBERED = 1000


class Remains:
    """Remembers the actors that have streams, and deletes those of actors that stay away.

    Args:
        on_deleted: called with the kind and name of each such actor.
    """

    def __init__(
        self, bus: Bus, names: Names, outbox: Outbox, on_deleted: Callable[[str, str], None] = lambda kind, name: None
    ) -> None:
        self._bus, self._names, self._outbox, self._on_deleted = bus, names, outbox, on_deleted
        self._known: dict[str, set[str]] = {"executor": set(), "detokenizer": set()}
        self._stored: Mapping[str, object] | None = None
        self._gone: dict[tuple[str, str], int] = {}
        """Rounds since each actor went."""
        self._deleted: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)

    async def recall(self) -> None:
        """Read the predecessor's list. Living actors are noticed later.

        Raises:
            BusUnavailable: it may be called again.
        """
        (stored,) = await self._bus.get_state(STATE)
        for kind, names in (stored or {}).items():
            if kind in self._known and isinstance(names, list):
                for name in map(str, names):
                    self.gone(kind, name)

    def here(self, kind: str, name: str) -> None:
        """Note that an actor is there, perhaps again."""
        self._known[kind].add(name)
        self._gone.pop((kind, name), None)

    def gone(self, kind: str, name: str) -> None:
        """Note that an actor has ended or was given up."""
        self._known[kind].add(name)
        self._gone.setdefault((kind, name), 0)

    def bus_restarted(self) -> None:
        """Schedule deleted streams again: they may be back."""
        self._stored = None
        for kind, name in self._deleted:
            if name not in self._known[kind]:
                self.gone(kind, name)

    async def clear(self) -> None:
        """Run one round.

        Raises:
            BusUnavailable: the next rounds do the rest.
        """
        for (kind, name), rounds in list(self._gone.items()):
            if (kind, name) not in self._gone:
                continue  # it came back while another was looked at
            self._gone[kind, name] = rounds + 1
            if rounds >= VANISH_ROUNDS and (rounds >= UNREAD_ROUNDS or await self._is_read(kind, name)):
                await self._delete(kind, name)
        known: dict[str, object] = {kind: sorted(names) for kind, names in self._known.items()}
        if known != self._stored:
            await self._bus.put_state(STATE, known)
            self._stored = known

    async def _is_read(self, kind: str, name: str) -> bool:
        """Whether no reader needs the actor's streams."""
        return kind == "detokenizer" or await self._bus.length(self._names.results(name)) == 0

    async def _delete(self, kind: str, name: str) -> None:
        if (kind, name) not in self._gone:
            return  # it came back meanwhile
        streams = tuple(self._streams(kind, name))
        self._outbox.forget(streams)
        self._gone.pop((kind, name))
        self._known[kind].discard(name)
        self._deleted.append((kind, name))
        self._on_deleted(kind, name)
        try:
            await self._bus.delete(*streams)
        except BusUnavailable:
            if name not in self._known[kind]:  # else it came back meanwhile
                self.gone(kind, name)
            raise

    def _streams(self, kind: str, name: str) -> Iterable[str]:
        if kind == "detokenizer":
            return (self._names.sequences(name),)
        return self._names.steps(name), self._names.results(name)
