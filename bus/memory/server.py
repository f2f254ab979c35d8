"""The data of a Redis server as Pagebus uses it, in plain Python: streams, groups, leases, state. Synchronous and
deterministic.

Entries are kept as encoded frames, so two actors of one process never share anything mutable. Ids of published entries
are ``(1, n)`` with one counter for the whole server, so ids never decrease when a stream is deleted and created again.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType

from pagebus.bus.contract import BusUnavailable

Position = tuple[int, int]
Fields = Mapping[bytes, bytes]


@dataclass(slots=True)
class Pending:
    """One delivered, not yet acked entry."""

    consumer: str
    deliveries: int

    def deliver_again(self) -> int:
        """How often it was delivered, with this time."""
        self.deliveries += 1
        return self.deliveries


@dataclass(slots=True)
class Group:
    """A consumer group. ``pending`` is kept in delivery order; ``consumers`` in order of appearance."""

    delivered: Position = (0, 0)
    pending: dict[Position, Pending] = field(default_factory=dict)
    consumers: dict[str, None] = field(default_factory=dict)

    def deliver(self, positions: Sequence[Position], consumer: str) -> None:
        """Deliver the next entries."""
        for position in positions:
            self.pending[position] = Pending(consumer, 1)
            self.delivered = position


@dataclass(slots=True)
class MemoryStream:
    """Entries ordered by id. ``last`` is the newest id ever added, also after trimming."""

    ids: list[Position] = field(default_factory=list)
    fields: dict[Position, Fields] = field(default_factory=dict)
    last: Position = (0, 0)
    groups: dict[str, Group] = field(default_factory=dict)

    def add(self, position: Position, fields: Mapping[bytes, bytes]) -> None:
        """Append an entry; the caller has checked that ``position`` is beyond ``last``."""
        self.ids.append(position)
        self.fields[position] = MappingProxyType(dict(fields))
        self.last = position

    def after(self, position: Position, count: int) -> list[Position]:
        """Up to ``count`` ids after ``position``."""
        start = bisect_right(self.ids, position)
        return self.ids[start : start + count]

    def remove(self, position: Position) -> bool:
        """Delete one entry, if it is there."""
        if self.fields.pop(position, None) is None:
            return False
        del self.ids[bisect_left(self.ids, position)]
        return True

    def remove_through(self, position: Position) -> int:
        """Delete everything up to and including ``position``; returns how many."""
        end = bisect_right(self.ids, position)
        for old in self.ids[:end]:
            del self.fields[old]
        del self.ids[:end]
        return end


@dataclass(slots=True)
class MemoryLease:
    """A lease: its holder's epoch, encoded info, and when it expires on the server's clock (s)."""

    epoch: int
    info: bytes
    expires_s: float


class MemoryServer:
    """The shared state behind every :class:`~pagebus.bus.memory.bus.MemoryBus` of one process.

    Args:
        clock: monotonic seconds, for leases and the life of state; tests pass their own.

    Attributes:
        unavailable: while True every operation raises :class:`BusUnavailable` (fault injection).
        expiries: streams and counters that are deleted at a time of the clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.unavailable = False
        self.streams: dict[str, MemoryStream] = {}
        self.expiries: dict[str, float] = {}
        self.leases: dict[str, MemoryLease] = {}
        self.granted: dict[str, int] = {}
        self.states: dict[str, tuple[bytes, float | None]] = {}
        self.tables: dict[str, dict[str, bytes]] = {}
        self.counters: dict[str, Counter[str]] = {}
        self.epoch = 0
        self._state_ends: list[tuple[float, str]] = []
        """A heap: when states expire, perhaps since replaced by others that live longer."""
        self._published = 0
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    def check(self) -> None:
        """Delete what has expired. Raise :class:`BusUnavailable` while the server is switched off."""
        if self.unavailable:
            raise BusUnavailable("the in-memory bus is switched off")
        for name in [name for name, until_s in self.expiries.items() if until_s <= self.clock()]:
            self.drop(name)
        while self._state_ends and self._state_ends[0][0] <= self.clock():
            self.live_state(heappop(self._state_ends)[1])

    # -- streams ------------------------------------------------------------------------------------------------------
    def stream(self, name: str) -> MemoryStream:
        """The stream, created if it does not exist."""
        return self.streams.setdefault(name, MemoryStream())

    def publish(self, name: str, fields: Mapping[bytes, bytes]) -> Position:
        """Add an entry under the next id and wake the stream's readers."""
        stream = self.stream(name)
        self._published += 1
        position = max((1, self._published), (stream.last[0], stream.last[1] + 1))
        self.append(name, position, fields)
        return position

    def append(self, name: str, position: Position, fields: Mapping[bytes, bytes]) -> None:
        """Add an entry under an explicit id beyond the last one and wake the stream's readers."""
        self.stream(name).add(position, fields)
        self.wake(name)

    def drop(self, name: str) -> None:
        """Delete a stream with its groups, or counters."""
        self.streams.pop(name, None)
        self.counters.pop(name, None)
        self.expiries.pop(name, None)

    # -- waiting ------------------------------------------------------------------------------------------------------
    def wake(self, name: str) -> None:
        """Wake everybody who waits for this stream, the one who has waited longest first; they look again and may find
        that another one was faster."""
        for waiter in self._waiting.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, names: Iterable[str], waiter: asyncio.Future[None], timeout_s: float) -> None:
        """Wait until one of the streams gets an entry, ``waiter`` is set by somebody else, or ``timeout_s`` passes."""
        names = tuple(names)
        for name in names:
            self._waiting.setdefault(name, {})[waiter] = None
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            for name in names:
                others = self._waiting.get(name)
                if others is not None:
                    others.pop(waiter, None)
                    if not others:
                        del self._waiting[name]

    # -- leases and state ---------------------------------------------------------------------------------------------
    def grant(self, key: str) -> int:
        """A new epoch, which the key's lease is granted, or denied to all before."""
        self.epoch += 1
        self.granted[key] = self.epoch
        return self.epoch

    def live_lease(self, key: str) -> MemoryLease | None:
        """The lease if it has not expired; an expired one is forgotten."""
        lease = self.leases.get(key)
        if lease is not None and lease.expires_s <= self.clock():
            del self.leases[key]
            return None
        return lease

    def put_state(self, key: str, value: bytes, ttl_s: float | None) -> None:
        """Store a state for ``ttl_s`` seconds (None: for ever)."""
        expires_s = None if ttl_s is None else self.clock() + ttl_s
        self.states[key] = value, expires_s
        if expires_s is not None:
            heappush(self._state_ends, (expires_s, key))

    def live_state(self, key: str) -> bytes | None:
        """The state if its time has not passed."""
        found = self.states.get(key)
        if found is None:
            return None
        value, expires_s = found
        if expires_s is not None and expires_s <= self.clock():
            del self.states[key]
            return None
        return value

    def table(self, key: str) -> dict[str, bytes]:
        """The rows of a table, created if it does not exist."""
        return self.tables.setdefault(key, {})

    def put_row(self, key: str, row: str, value: bytes, *, replace: bool) -> bool:
        """Store a row, or leave an existing one as it is; returns whether it is new."""
        rows = self.table(key)
        is_new = row not in rows
        if is_new or replace:
            rows[row] = value
        return is_new

    def count(self, counts: Mapping[str, Mapping[str, int]], ttl_s: float) -> None:
        """Add to counters, which are kept for ``ttl_s`` seconds from then on."""
        for key, added in counts.items():
            self.counters.setdefault(key, Counter()).update(added)
            self.expiries[key] = self.clock() + ttl_s
