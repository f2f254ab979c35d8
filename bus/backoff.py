"""Growing, jittered pauses between attempts."""

from __future__ import annotations

import random


class Backoff:
    """Pauses that double from ``first_s`` to ``most_s``, each shortened by up to half at random.

    The jitter keeps many actors, cut off by the same restart, from coming back in the same instant.
    """

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng or random.Random()
        self._pause_s = first_s

    def reset(self) -> None:
        """The last attempt succeeded: start over with ``first_s``."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause_s = self._pause_s
        self._pause_s = min(self._pause_s * 2, self._most_s)
        return pause_s * (1 - self._rng.random() / 2)
