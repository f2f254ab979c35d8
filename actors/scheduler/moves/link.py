"""The way from one replica to another: how fast blocks come, whether they come at all, and what that is worth."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.read_rate import ReadRate

MOST_FAILURES = 3
"""Pulls in a row that may fail before nothing is pulled over a link any more."""
BESIDE_S = 0.001
"""What a pull takes beside the bytes: a plan, a report, and a plan."""
PROBE_BYTES = 1 << 22
"""So much is pulled to learn the rate: a long prefix would take minutes over a slow link."""


class Link:
    """Its ``rate``. ``num_under_way`` blocks, of ``block_bytes`` each, are ordered, and neither there nor given up."""

    def __init__(self, rate: ReadRate, block_bytes: int) -> None:
        self.num_under_way = 0
        self._rate = rate
        self._block_bytes = block_bytes
        self._probe = max(1, PROBE_BYTES // max(1, block_bytes))
        self._failures = 0
        self._is_fast = False
        """Whether a probe was over too soon to tell the rate."""

    @property
    def bytes_per_s(self) -> float:
        """What pulls have shown; 0: there was none, or it was over too soon."""
        return self._rate.bytes_per_s

    @property
    def is_unknown(self) -> bool:
        """Whether nobody has pulled over it."""
        return not self._rate.bytes_per_s and not self._is_fast

    @property
    def is_broken(self) -> bool:
        """Whether too many pulls have failed."""
        return self._failures >= MOST_FAILURES

    def saves(self, num_blocks: int, num_tokens: int, ahead: float) -> int:
        """By how many tokens of a device a sequence is sooner if ``num_blocks``, which hold ``num_tokens``, come over
        it now; 0 or less: computing them is quicker. While the device computes the ``ahead`` tokens of others, the
        sequence waits in any case."""
        return int(num_tokens - max(0.0, self.waits(num_blocks) - ahead))

    def waits(self, num_blocks: int) -> float:
        """Tokens that a device could compute until so many blocks have come, behind those under way."""
        return self.cost_tokens(num_blocks + self.num_under_way)

    def room(self, num_blocks: int, saved: int) -> int:
        """How many of ``num_blocks``, which save so many tokens, are to be pulled now: all, if that pays; a few, if the
        rate is not known, or it is time to see whether it still is so bad; or none."""
        if self.is_unknown:
            return min(num_blocks, max(0, self._probe - self.num_under_way))
        if saved > 0:
            return num_blocks
        tries = not self.num_under_way and self._rate.pays(self.cost_tokens(self._probe), 0)
        return min(num_blocks, self._probe) if tries else 0

    def cost_tokens(self, num_blocks: int) -> float:
        """Tokens that a device could compute while so many blocks come over it; 0: not known."""
        return self._rate.tokens(num_blocks, BESIDE_S) or 0.0

    def pays_for_block(self, num_tokens: float) -> bool:
        """Whether one of many blocks comes more quickly than its tokens are computed, as far as known."""
        return (self._rate.tokens(1) or 0.0) < num_tokens

    def seconds(self, num_blocks: int) -> float:
        """How long so many blocks take, behind those under way; 0: not known."""
        rate = self.bytes_per_s
        return BESIDE_S + (num_blocks + self.num_under_way) * self._block_bytes / rate if rate else 0.0

    def begin(self, num_blocks: int) -> None:
        """So many blocks are to come."""
        self.num_under_way += num_blocks
        self._rate.began()

    def expect_no_more(self, num_blocks: int) -> None:
        """So many blocks have come, or nobody waits for them any more."""
        self.num_under_way -= num_blocks

    def decline(self, num_tokens: int) -> None:
        """So many tokens are computed, as they would come too slowly. Blocks under way will tell how fast it is."""
        if not self.num_under_way:
            self._rate.declined(num_tokens)

    def ended(self, num_blocks: int, *, there: bool, bytes_per_s: float, probes: bool = False) -> None:
        """A pull of so many blocks has ended. ``probes``: it was to tell the rate."""
        self._failures = 0 if there else self._failures + 1
        num_bytes = num_blocks * self._block_bytes
        self._is_fast = probes and PROBE_BYTES / 2 <= num_bytes <= bytes_per_s * BESIDE_S
        if self._is_fast:
            self._rate.forget()
        else:
            self._rate.learn(bytes_per_s)
