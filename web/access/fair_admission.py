"""Fair admission: shares a full server among API keys by their weights.

The scheduler shares slots by weight among the requests that it has. Without fair admission, the client that sends the
most requests would fill the server, and the requests of others would not reach the scheduler. A key that is rejected
for lack of room *waits* for a while. Meanwhile its room is kept free from keys that would hold more for their weight
than it would. Keys that all want more than there is therefore hold room in proportion to their weights, to within a
request or two. What one key does not need is shared by the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pagebus.web.access.auth import ApiKey

PATIENCE_S = 2.0
"""Seconds for which room is kept for a key after a rejection."""
NOTHING = 1e-9


@dataclass(slots=True)
class Holder:
    """A key: the part of all room that it holds, the part that it was refused, and until when that refusal counts."""

    weight: float
    held: float = 0.0
    wanted: float = 0.0
    waits_until_s: float = -math.inf

    def after(self, more: float) -> float:
        """What it would hold in proportion to its weight."""
        return (self.held + more) / self.weight


class FairAdmission:
    """The keys of one ingress. Keys are compared only while one waits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._holders: dict[str, Holder] = {}
        self._anybody_waits_until_s = -math.inf

    def enter(self, key: ApiKey, part: float) -> None:
        """Add a part of all room to what the key holds."""
        self._holder(key).held += part

    def leave(self, key: ApiKey, part: float) -> None:
        """Remove a part of what the key holds."""
        holder = self._holders[key.name]
        holder.held -= part
        if holder.held < NOTHING and holder.waits_until_s < self._clock():
            del self._holders[key.name]

    def wait(self, key: ApiKey, part: float) -> None:
        """Record that there was no room for this part."""
        holder = self._holder(key)
        holder.wanted, holder.waits_until_s = part, self._clock() + PATIENCE_S
        self._anybody_waits_until_s = holder.waits_until_s

    def is_kept(self, key: ApiKey, part: float, free: float) -> bool:
        """Whether this much of the ``free`` part is reserved for other keys, which would hold less for their weight."""
        now_s = self._clock()
        if now_s >= self._anybody_waits_until_s:
            return False
        mine = self._holder(key).after(part) - NOTHING
        kept = [
            holder.wanted
            for name, holder in self._holders.items()
            if name != key.name and holder.waits_until_s > now_s and holder.after(holder.wanted) < mine
        ]
        return bool(kept) and part + sum(kept) > free + NOTHING

    def _holder(self, key: ApiKey) -> Holder:
        holder = self._holders.setdefault(key.name, Holder(key.weight))
        holder.weight = key.weight  # the file may have changed
        return holder
