"""The way from one replica to another: how fast blocks come, whether they come at all, and what that is worth."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.read_rate import ReadRate

MOST_FAILURES = 3
"""Pulls in a row that may fail before nothing is pulled over a link any more."""
BESIDE_S = 0.001
"""What a pull takes beside the bytes: a plan, a report, and a plan."""
PROBE_BYTES = 1 << 22
"""So much is pulled at most while it is not known whether pulls pay: one over a slow link would take seconds."""


class Link:
    """Its ``rate``. ``num_under_way`` blocks of ``block_bytes`` are ordered, and neither there nor given up."""

    def __init__(self, rate: ReadRate, block_bytes: int) -> None:
        self.num_under_way = 0
        self._rate = rate
        self._block_bytes = block_bytes
        self._failures = 0
        self._is_fast = False
        """Whether a probe was over too soon to tell the rate."""

    @property
    def is_broken(self) -> bool:
        """Whether too many pulls have failed."""
        return self._failures >= MOST_FAILURES

    def saves(self, num_blocks: int, num_tokens: int) -> int:
        """How many tokens less a device has to compute if ``num_blocks``, which hold ``num_tokens``, come over it now;
        0 or less: computing them is quicker."""
        return int(num_tokens - self.cost_tokens(num_blocks + self.num_under_way))

    def room(self, num_blocks: int, num_tokens: int) -> int | None:
        """How many blocks may be pulled for now, to learn the rate by, if nothing but a guess says that pulling blocks
        with so many tokens pays; None: it is no guess."""
        cost = self._rate.seen_tokens(num_blocks + self.num_under_way, BESIDE_S)
        if self._is_fast if cost is None else num_tokens > cost:
            return None
        return max(0, max(1, PROBE_BYTES // max(1, self._block_bytes)) - self.num_under_way)

    def cost_tokens(self, num_blocks: int) -> float:
        """Tokens that a device could compute while so many blocks come over it; 0: not known."""
        return self._rate.tokens(num_blocks, BESIDE_S) or 0.0

    def decline(self) -> None:
        """Blocks were computed, as they would have come too slowly."""
        self._rate.doubt()

    def ended(self, num_blocks: int, *, there: bool, bytes_per_s: float, probes: bool = False) -> None:
        """A pull of so many blocks has ended. ``probes``: it was to tell the rate."""
        self._failures = 0 if there else self._failures + 1
        num_bytes = num_blocks * self._block_bytes
        self._is_fast = probes and PROBE_BYTES / 2 <= num_bytes <= bytes_per_s * BESIDE_S
        if self._is_fast:
            self._rate.forget()
        else:
            self._rate.learn(bytes_per_s)
