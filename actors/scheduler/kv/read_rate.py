"""How fast blocks come from where they are read, by what has been seen, and what waiting for them costs."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.prompt_rate import PromptRate

NEWEST_SHARE = 0.5
"""Weight of the newest rate."""
TRY_SHARE = 0.03
"""Of the tokens that are computed because reading is too slow: so many more may be lost by reading once more, to see
whether it still is."""


class ReadRate:
    """Of blocks of so many bytes, for a device that computes prompts at a rate (0: that is not known)."""

    def __init__(self, block_bytes: int, prompts: PromptRate) -> None:
        self._block_bytes, self._prompts = block_bytes, prompts
        self._spare_tokens = 0.0
        self.bytes_per_s = 0.0
        """0: none has been seen."""

    def tokens(self, num_blocks: int, beside_s: float = 0.0) -> float | None:
        """Tokens that could be computed in the time in which blocks are read, and ``beside_s``; None: not known."""
        prompt_rate = self._prompts.tokens_per_s
        if not prompt_rate or not self.bytes_per_s:
            return None
        return (num_blocks * self._block_bytes / self.bytes_per_s + beside_s) * prompt_rate

    def pays(self, cost_tokens: float, num_tokens: int) -> bool:
        """Whether something is to be read that costs and saves so many tokens: it pays, or what it loses is little
        beside what has been computed since the last time."""
        return cost_tokens - num_tokens <= self._spare_tokens

    def began(self) -> None:
        """Something is being read."""
        self._spare_tokens = 0.0

    def declined(self, num_tokens: int) -> None:
        """So many tokens are computed, because reading them does not pay."""
        self._spare_tokens += TRY_SHARE * num_tokens

    def learn(self, bytes_per_s: float) -> None:
        """Blocks have been read so fast; 0: none has."""
        if bytes_per_s:
            self.bytes_per_s += (bytes_per_s - self.bytes_per_s) * (NEWEST_SHARE if self.bytes_per_s else 1.0)

    def forget(self) -> None:
        """Nothing has been seen."""
        self.bytes_per_s = 0.0
