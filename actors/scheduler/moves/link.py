"""The link from one replica to another: how fast blocks come, whether they come at all, and what that is worth."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.read_rate import ReadRate

MOST_FAILURES = 3
"""Failed pulls in a row after which a link is not used any more."""
BESIDE_S = 0.001
"""The fixed time of a pull, besides its bytes: a plan, a report, and another plan."""
PROBE_BYTES = 1 << 22
"""The size of a pull that measures the rate. A long prefix could take minutes over a slow link."""


class Link:
    """One link and its ``rate``. ``num_under_way``: blocks, of ``block_bytes`` each, that are ordered and neither there
    nor given up."""

    def __init__(self, rate: ReadRate, block_bytes: int) -> None:
        self.num_under_way = 0
        self._rate = rate
        self._block_bytes = block_bytes
        self._probe = max(1, PROBE_BYTES // max(1, block_bytes))
        self._failures = 0
        self._is_fast = False
        """Whether a probe ended too quickly to measure the rate."""

    @property
    def bytes_per_s(self) -> float:
        """The measured rate; 0: there was no pull yet, or it ended too quickly to measure."""
        return self._rate.bytes_per_s

    @property
    def is_unknown(self) -> bool:
        """Whether nothing was pulled over it yet."""
        return not self._rate.bytes_per_s and not self._is_fast

    @property
    def is_broken(self) -> bool:
        """Whether too many pulls have failed."""
        return self._failures >= MOST_FAILURES

    def saves(self, num_blocks: int, num_tokens: int, ahead: float) -> int:
        """How much sooner a sequence continues if ``num_blocks`` with ``num_tokens`` come over this link now, in tokens
        that a device computes; 0 or less: computing them is quicker. The sequence waits in any case while the device
        computes the ``ahead`` tokens of others."""
        return int(num_tokens - max(0.0, self.waits(num_blocks) - ahead))

    def waits(self, num_blocks: int) -> float:
        """Tokens that a device could compute until this many blocks have come, after those under way."""
        return self.cost_tokens(num_blocks + self.num_under_way)

    def room(self, num_blocks: int, saved: int) -> int:
        """How many of ``num_blocks``, which save ``saved`` tokens, to pull now: all if that pays, a few if the rate is
        unknown or it is time to measure a slow link again, otherwise none."""
        if self.is_unknown:
            return min(num_blocks, max(0, self._probe - self.num_under_way))
        if saved > 0:
            return num_blocks
        tries = not self.num_under_way and self._rate.pays(self.cost_tokens(self._probe), 0)
        return min(num_blocks, self._probe) if tries else 0

    def cost_tokens(self, num_blocks: int) -> float:
        """Tokens that a device could compute while this many blocks come; 0: unknown."""
        return self._rate.tokens(num_blocks, BESIDE_S) or 0.0

    def pays_for_block(self, num_tokens: float) -> bool:
        """Whether one of many blocks comes faster than its tokens are computed, as far as is known."""
        return (self._rate.tokens(1) or 0.0) < num_tokens

    def seconds(self, num_blocks: int) -> float:
        """Seconds until this many blocks have come, after those under way; 0: unknown."""
        rate = self.bytes_per_s
        return BESIDE_S + (num_blocks + self.num_under_way) * self._block_bytes / rate if rate else 0.0

    def begin(self, num_blocks: int) -> None:
        """A pull of this many blocks begins."""
        self.num_under_way += num_blocks
        self._rate.began()

    def expect_no_more(self, num_blocks: int) -> None:
        """This many blocks have come, or no sequence waits for them any more."""
        self.num_under_way -= num_blocks

    def decline(self, num_tokens: int) -> None:
        """This many tokens are computed, because pulling them would be too slow. If blocks are under way, they will
        show the rate."""
        if not self.num_under_way:
            self._rate.declined(num_tokens)

    def ended(self, num_blocks: int, *, there: bool, bytes_per_s: float, probes: bool = False) -> None:
        """A pull of this many blocks has ended. ``probes``: its purpose was to measure the rate."""
        self._failures = 0 if there else self._failures + 1
        num_bytes = num_blocks * self._block_bytes
        self._is_fast = probes and PROBE_BYTES / 2 <= num_bytes <= bytes_per_s * BESIDE_S
        if self._is_fast:
            self._rate.forget()
        else:
            self._rate.learn(bytes_per_s)
