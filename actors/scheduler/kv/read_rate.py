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
        """What it is thought to be; 0: none has been seen."""
        self.seen = 0.0
        """What it was last seen to be."""

    def tokens(self, num_blocks: int, beside_s: float = 0.0) -> float | None:
        """Tokens that could be computed in the time in which blocks are read, and ``beside_s``; None: not known."""
        return self._tokens(num_blocks, beside_s, self.bytes_per_s)

    def seen_tokens(self, num_blocks: int, beside_s: float = 0.0) -> float | None:
        """The same without any doubt."""
        return self._tokens(num_blocks, beside_s, self.seen)

    def _tokens(self, num_blocks: int, beside_s: float, bytes_per_s: float) -> float | None:
        if not self._prefill_rate or not bytes_per_s:
            return None
        return (num_blocks * self._block_bytes / bytes_per_s + beside_s) * self._prefill_rate

    def learn(self, bytes_per_s: float) -> None:
        """Blocks have been read so fast; 0: none has."""
        if bytes_per_s:
            self.seen += (bytes_per_s - self.seen) * (NEWEST_SHARE if self.seen else 1.0)
            self.bytes_per_s = self.seen

    def doubt(self) -> None:
        """Nothing was read, as the rate is too low."""
        self.bytes_per_s *= DOUBT

    def forget(self) -> None:
        """Nothing is known."""
        self.bytes_per_s = self.seen = 0.0
