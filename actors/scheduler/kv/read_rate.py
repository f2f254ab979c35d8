"""How fast blocks are read or pulled, as measured, and what waiting for them costs."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.prompt_rate import PromptRate

NEWEST_SHARE = 0.5
"""Weight of the newest rate."""
TRY_SHARE = 0.03
"""The share of the tokens computed because reading is too slow that may be lost to another read, which shows whether it
still is."""


class ReadRate:
    """The rate for blocks of ``block_bytes``, and a device that computes prompts at the rate ``prompts``."""

    def __init__(self, block_bytes: int, prompts: PromptRate) -> None:
        self._block_bytes, self._prompts = block_bytes, prompts
        self._spare_tokens = 0.0
        self.bytes_per_s = 0.0
        """0: not measured."""

    def tokens(self, num_blocks: int, beside_s: float = 0.0) -> float | None:
        """Tokens that could be computed while blocks are read, plus ``beside_s`` seconds; None: unknown."""
        prompt_rate = self._prompts.tokens_per_s
        if not prompt_rate or not self.bytes_per_s:
            return None
        return (num_blocks * self._block_bytes / self.bytes_per_s + beside_s) * prompt_rate

    def pays(self, cost_tokens: float, num_tokens: int) -> bool:
        """Whether to read something that costs ``cost_tokens`` and saves ``num_tokens``: it pays, or it loses little
        compared with what was computed since the last read."""
        return cost_tokens - num_tokens <= self._spare_tokens

    def began(self) -> None:
        """A read has begun."""
        self._spare_tokens = 0.0

    def declined(self, num_tokens: int) -> None:
        """This many tokens are computed, because reading them does not pay."""
        self._spare_tokens += TRY_SHARE * num_tokens

    def learn(self, bytes_per_s: float) -> None:
        """Blocks were read at this rate; 0: none was read."""
        if bytes_per_s:
            self.bytes_per_s += (bytes_per_s - self.bytes_per_s) * (NEWEST_SHARE if self.bytes_per_s else 1.0)

    def forget(self) -> None:
        """Forget what was measured."""
        self.bytes_per_s = 0.0
