"""The quota of stored responses: the bytes that an ingress keeps on the bus, per API key and in total.

Above the quota, finished responses are deleted, the oldest first: those of the key that exceeds its limit, or of the
key that holds most. Responses under way are never deleted. If they alone fill the quota, no further response is
accepted.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

KEY_BYTES = 256
"""Bytes that a Redis key takes beside its value."""


@dataclass(slots=True)
class Item:
    """Bytes of a response's record and of its events, of which there are ``num_pieces``; or what was ``reserved`` for
    it, if that is more."""

    until_s: float = 0.0
    record_bytes: int = 0
    events_bytes: int = 0
    reserved: int = 0
    num_pieces: int = 0
    is_over: bool = False

    @property
    def num_bytes(self) -> int:
        return max(self.record_bytes + self.events_bytes, self.reserved)


class ResponseQuota:
    """The quota of an ingress. ``owner`` is the name of a key, "" where none is needed: then only ``max_bytes`` counts.
    A response expires ``ttl_s`` after its last write."""

    def __init__(
        self, max_bytes: int, max_bytes_of_key: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self._max_bytes_of_key = max_bytes_of_key
        self._ttl_s = ttl_s
        self._clock = clock
        self._items: defaultdict[str, dict[str, Item]] = defaultdict(dict)
        """Items by owner and id; the last written comes last."""
        self._bytes: Counter[str] = Counter()

    def limit(self, owner: str) -> int:
        """The quota of one key in bytes."""
        return min(self.max_bytes, self._max_bytes_of_key) if owner else self.max_bytes

    def num_bytes(self, owner: str) -> int:
        return self._bytes[owner]

    # -- what is there ------------------------------------------------------------------------------------------------
    def reserve(self, owner: str, response_id: str, num_bytes: int) -> None:
        """Reserve room for a response under way."""
        self._lay(owner, response_id, Item(reserved=num_bytes))

    def grow(self, owner: str, response_id: str, place: int, num_bytes: int) -> None:
        """Count the ``place``-th piece of a response's events."""
        item = self._take(owner, response_id)
        item.events_bytes += num_bytes + KEY_BYTES
        item.num_pieces = place + 1
        self._lay(owner, response_id, item)

    def put(self, owner: str, response_id: str, num_bytes: int) -> None:
        """Count the record of a finished response."""
        item = self._take(owner, response_id)
        item.record_bytes, item.reserved, item.is_over = num_bytes + KEY_BYTES, 0, True
        self._lay(owner, response_id, item)

    def remove(self, owner: str, response_id: str) -> int:
        """Remove a response; returns the number of its pieces, as far as known here."""
        return self._take(owner, response_id).num_pieces

    def under_way(self) -> list[tuple[str, str]]:
        """Owners and ids of the responses under way, as far as known here."""
        return [(owner, each) for owner, items in self._items.items() for each in items if not items[each].is_over]

    def _take(self, owner: str, response_id: str) -> Item:
        item = self._items[owner].pop(response_id, None) or Item()
        self._bytes[owner] -= item.num_bytes
        return item

    def _lay(self, owner: str, response_id: str, item: Item) -> None:
        item.until_s = self._clock() + self._ttl_s
        self._items[owner][response_id] = item
        self._bytes[owner] += item.num_bytes

    # -- what has to go -----------------------------------------------------------------------------------------------
    def has_room(self, owner: str, more: int) -> bool:
        """Whether the owner has room for so many more bytes."""
        return self._bytes[owner] + more <= self.limit(owner) and self._bytes.total() + more <= self.max_bytes

    def make_room(self, owner: str, more: int = 0) -> list[tuple[str, int]]:
        """Make room by removing finished responses. Returns their ids and numbers of pieces. The room may still not
        suffice, because responses under way stay."""
        self._expire()
        gone = self._drop(owner, self._bytes[owner] + more - self.limit(owner))
        if self._bytes[owner] + more > self.limit(owner):
            return gone
        excess = self._bytes.total() + more - self.max_bytes
        for largest, before in self._bytes.most_common() if excess > 0 else ():
            gone += self._drop(largest, excess)
            excess -= before - self._bytes[largest]
        return gone

    def _drop(self, owner: str, excess: int) -> list[tuple[str, int]]:
        """Remove a key's oldest finished responses, until ``excess`` bytes are free."""
        found: list[str] = []
        for response_id, item in self._items[owner].items():
            if excess <= 0:
                break
            if item.is_over:
                found.append(response_id)
                excess -= item.num_bytes
        return [(response_id, self.remove(owner, response_id)) for response_id in found]

    def _expire(self) -> None:
        now_s = self._clock()
        for owner, items in list(self._items.items()):
            while items and items[first := next(iter(items))].until_s <= now_s:
                self.remove(owner, first)
            if not items:
                del self._items[owner], self._bytes[owner]
