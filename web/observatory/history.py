"""The figures of the last day, stored on the bus in three rings of samples of different lengths and resolutions.

The first ingress by name records them, whether or not a page is connected. A sample costs one read of all metrics. Each
ring is stored every few samples, so that the next ingress can continue it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pagebus.bus.contract import Bus, BusUnavailable
from pagebus.web.observatory.vitals import FIGURES, Spans, Totals

DAY_S = 86400.0
STORE_EVERY_S = 10.0
EXPIRY_S = 2 * DAY_S


@dataclass(slots=True)
class Ring:
    """At most ``length`` samples, one every ``every_s`` seconds; a sample is its time and the figures."""

    every_s: float
    length: int
    samples: deque[list[float | None]] = field(default_factory=deque)
    spans: Spans = field(default_factory=Spans)
    stored_s: float = 0.0

    @property
    def name(self) -> str:
        return f"history:{self.every_s:g}"

    def sample(self, totals: Totals) -> bool:
        """Take a sample if one is due. Returns whether the ring should be stored."""
        last = self.spans.last
        if last is not None and 0 <= totals.at_s - last.at_s < self.every_s - 0.25:
            return False
        self._drop_after(totals.at_s)
        if (found := self.spans.next(totals)) is None:
            return False
        self.samples.append([round(totals.at_s, 3), *found])
        while len(self.samples) > self.length:
            self.samples.popleft()
        if totals.at_s - self.stored_s < STORE_EVERY_S:
            return False
        self.stored_s = totals.at_s
        return True

    def _drop_after(self, now_s: float) -> None:
        """Drop what lies in the future, because the clock was set back."""
        while self.samples and (self.samples[-1][0] or 0.0) > now_s:
            self.samples.pop()
        self.stored_s = min(self.stored_s, now_s)

    def stored(self) -> dict[str, Any]:
        return {"figures": list(FIGURES), "samples": list(self.samples)}

    def restore(self, state: Any) -> None:
        """Restore stored samples, unless they are of other figures."""
        if isinstance(state, dict) and state.get("figures") == list(FIGURES):
            self.samples = deque(state["samples"], self.length)


def rings() -> list[Ring]:
    """Ten minutes, three hours and a day."""
    return [Ring(2.0, 300), Ring(30.0, 360), Ring(240.0, 360)]


class History:
    """``read_totals`` adds up the metrics of now; ``is_first`` says whether this ingress keeps the history."""

    def __init__(self, bus: Bus, read_totals: Callable[[], Awaitable[Totals]], is_first: Callable[[], bool]) -> None:
        self._bus = bus
        self._read_totals = read_totals
        self._is_first = is_first
        self._rings = rings()
        self._keeps = False

    async def run(self) -> None:
        """Take samples until cancelled, while this ingress is the first."""
        while True:
            with suppress(BusUnavailable):
                await self._turn()
            await asyncio.sleep(self._rings[0].every_s)

    async def _turn(self) -> None:
        if not self._is_first():
            self._keeps = False
            return
        if not self._keeps:
            self._rings = rings()
            for ring, state in zip(self._rings, await self._stored(), strict=True):
                ring.restore(state)
            self._keeps = True
        totals = await self._read_totals()
        for ring in self._rings:
            if ring.sample(totals):
                await self._bus.put_state(ring.name, ring.stored(), ttl_s=EXPIRY_S)

    @property
    def is_kept_here(self) -> bool:
        """Whether this ingress records it."""
        return self._keeps

    def spans(self) -> Spans:
        """What makes figures, with the last half minute if it is kept here; empty otherwise."""
        return self._rings[0].spans.copy() if self._keeps else Spans()

    async def _stored(self) -> list[Any]:
        return list(await self._bus.get_state(*(ring.name for ring in self._rings)))

    async def read(self, span_s: float) -> dict[str, Any]:
        """The samples of the last ``span_s`` seconds, from the finest ring that reaches so far back."""
        found = self._rings
        if not self._keeps:
            found = rings()
            for ring, state in zip(found, await self._stored(), strict=True):
                ring.restore(state)
        ring = next((each for each in found if each.every_s * each.length >= span_s), found[-1])
        since_s = time.time() - span_s
        samples = [sample for sample in ring.samples if sample[0] is not None and sample[0] >= since_s]
        return {"every_s": ring.every_s, "figures": list(FIGURES), "samples": samples}
