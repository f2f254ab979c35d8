"""The streams of executors and detokenizers that are gone. Where names are used once, as in containers, nobody else
would ever delete them.

A stream stays for a while after its actor: it may come back under its name, others may still read what it wrote, and
the fence at the end of its results keeps a late write of it out. Which streams there are is kept on the bus, so that
a later scheduler knows of those whose actors died while there was none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from pagebus.bus.contract import Bus
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names

VANISH_ROUNDS = 120
"""Rounds of housekeeping, about one a second, from an actor's end until its streams are deleted."""
UNREAD_ROUNDS = 5 * VANISH_ROUNDS
"""The same for results that have not been read by all."""
STATE = "streams"
REMEMBERED = 1000


class Remains:
    """Remembers whose streams there are, and deletes those of actors that stay away.

    Args:
        on_deleted: is told the kind and name of each such actor.
    """

    def __init__(
        self, bus: Bus, names: Names, outbox: Outbox, on_deleted: Callable[[str, str], None] = lambda kind, name: None
    ) -> None:
        self._bus, self._names, self._outbox, self._on_deleted = bus, names, outbox, on_deleted
        self._known: dict[str, set[str]] = {"executor": set(), "detokenizer": set()}
        self._stored: Mapping[str, object] | None = None
        self._gone: dict[tuple[str, str], int] = {}
        """For how many rounds by now."""
        self._deleted: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)

    async def recall(self) -> None:
        """What a predecessor knew of. Who is still there will be seen.

        Raises:
            BusUnavailable: it may be called again.
        """
        (stored,) = await self._bus.get_state(STATE)
        for kind, names in (stored or {}).items():
            if kind in self._known and isinstance(names, list):
                for name in map(str, names):
                    self.gone(kind, name)

    def here(self, kind: str, name: str) -> None:
        """An actor is there, perhaps again."""
        self._known[kind].add(name)
        self._gone.pop((kind, name), None)

    def gone(self, kind: str, name: str) -> None:
        """An actor has ended, or was given up."""
        self._known[kind].add(name)
        self._gone.setdefault((kind, name), 0)

    def bus_restarted(self) -> None:
        """What had been deleted may be there again."""
        self._stored = None
        for kind, name in self._deleted:
            if name not in self._known[kind]:
                self.gone(kind, name)

    async def clear(self) -> None:
        """One round.

        Raises:
            BusUnavailable: the next round does what this one has not.
        """
        for (kind, name), rounds in list(self._gone.items()):
            self._gone[kind, name] = rounds + 1
            if rounds >= VANISH_ROUNDS and (rounds >= UNREAD_ROUNDS or await self._is_read(kind, name)):
                await self._delete(kind, name)
        known: dict[str, object] = {kind: sorted(names) for kind, names in self._known.items()}
        if known != self._stored:
            await self._bus.put_state(STATE, known)
            self._stored = known

    async def _is_read(self, kind: str, name: str) -> bool:
        """Whether nobody needs what is there."""
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
        await self._bus.delete(*streams)

    def _streams(self, kind: str, name: str) -> Iterable[str]:
        if kind == "detokenizer":
            return (self._names.sequences(name),)
        return self._names.steps(name), self._names.results(name)
