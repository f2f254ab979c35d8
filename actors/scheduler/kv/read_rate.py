"""How fast blocks come from where they are read, by what has been seen, and what waiting for them costs."""

from __future__ import annotations

NEWEST_SHARE = 0.5
"""Weight of the newest rate."""
DOUBT = 1.05
"""How much better a rate is thought to be each time that it was too bad to read: it may have been a bad moment."""


class ReadRate:
    """Of blocks of so many bytes, for a device that computes so many tokens a second; 0: that is not known."""

    def __init__(self, block_bytes: int, prefill_tokens_per_s: float) -> None:
        self._block_bytes, self._prefill_rate = block_bytes, prefill_tokens_per_s
        self.bytes_per_s = 0.0
        """0: none has been seen."""

    def tokens(self, num_blocks: int, beside_s: float = 0.0) -> float | None:
        """Tokens that could be computed in the time in which blocks are read, and ``beside_s``; None: not known."""
        if not self._prefill_rate or not self.bytes_per_s:
            return None
        return (num_blocks * self._block_bytes / self.bytes_per_s + beside_s) * self._prefill_rate

    def learn(self, bytes_per_s: float) -> None:
        """Blocks have been read so fast; 0: none has."""
        if bytes_per_s:
            self.bytes_per_s += (bytes_per_s - self.bytes_per_s) * (NEWEST_SHARE if self.bytes_per_s else 1.0)

    def doubt(self) -> None:
        """Nothing was read, as the rate is too low."""
        self.bytes_per_s *= DOUBT
