"""How fast a device computes prompts: measured at startup, then by the steps that it does."""

from __future__ import annotations

from collections import deque

LEAST_TOKENS = 256
"""The fewest prompt tokens of a step that counts. Smaller steps take nearly as long, and say little about long
prompts."""
FORGET = 0.8
"""Weight of a step relative to the one after it."""


class PromptRate:
    """``tokens_per_s`` is a weighted mean over steps of prompts alone, in proportion to their tokens. The rate measured
    at startup has the weight of the smallest step. Without it, ``tokens_per_s`` stays 0."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self._tokens = float(LEAST_TOKENS)
        self._seconds = LEAST_TOKENS / tokens_per_s if tokens_per_s > 0 else 0.0
        self._in_flight: deque[int] = deque()
        self._last_done_s = 0.0

    def planned(self, num_tokens: int) -> None:
        """Note a planned step with this many tokens of prompts alone; 0: it has other rows. :meth:`done` brings its
        time, in order."""
        self._in_flight.append(num_tokens)

    def done(self, launched_s: float, done_s: float) -> None:
        """The next planned step was launched and done at these times of its executor's clock. While the step before it
        ran, it waited; only the rest is its own time."""
        num_tokens, seconds = self._in_flight.popleft(), done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s
        if num_tokens < LEAST_TOKENS or seconds <= 0 or not self.tokens_per_s:
            return
        self._tokens = FORGET * self._tokens + num_tokens
        self._seconds = FORGET * self._seconds + seconds
        self.tokens_per_s = self._tokens / self._seconds
