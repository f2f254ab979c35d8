"""The way from one replica to another: how fast blocks come, whether they come at all, and what that is worth."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.read_rate import ReadRate

MOST_FAILURES = 3
"""Pulls in a row that may fail before nothing is pulled over a link any more."""
BESIDE_S = 0.001
"""What a pull takes beside the bytes: a plan, a report, and a plan."""


class Link:
    """Its ``rate``. ``num_under_way`` blocks are ordered, and neither there nor given up."""

    def __init__(self, rate: ReadRate) -> None:
        self.num_under_way = 0
        self._rate = rate
        self._failures = 0

    @property
    def bytes_per_s(self) -> float:
        """What pulls have shown; 0: there was none."""
        return self._rate.bytes_per_s

    @property
    def is_broken(self) -> bool:
        """Whether too many pulls have failed."""
        return self._failures >= MOST_FAILURES

    def saves(self, num_blocks: int, num_tokens: int, ahead: int) -> int:
        """By how many tokens of a device a sequence is sooner if ``num_blocks``, which hold ``num_tokens``, come over
        it now; 0 or less: computing them is quicker. While the device computes the ``ahead`` tokens of others, the
        sequence waits in any case. 1 also where blocks are to come to show how fast the link is now."""
        waits = max(0.0, self.cost_tokens(num_blocks + self.num_under_way) - ahead)
        saved = int(num_tokens - waits)
        return max(1, saved) if self._rate.pays(waits, num_tokens) else saved

    def cost_tokens(self, num_blocks: int) -> float:
        """Tokens that a device could compute while so many blocks come over it; 0: not known."""
        return self._rate.tokens(num_blocks, BESIDE_S) or 0.0

    def begin(self, num_blocks: int) -> None:
        """So many blocks are to come."""
        self.num_under_way += num_blocks
        self._rate.began()

    def decline(self, num_tokens: int) -> None:
        """So many tokens are computed, as they would come too slowly. Blocks under way will tell how fast it is."""
        if not self.num_under_way:
            self._rate.declined(num_tokens)

    def ended(self, *, there: bool, bytes_per_s: float) -> None:
        """A pull has ended."""
        self._failures = 0 if there else self._failures + 1
        self._rate.learn(bytes_per_s)
