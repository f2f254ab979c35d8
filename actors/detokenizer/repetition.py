"""Outputs that repeat themselves, found token by token."""

from __future__ import annotations

import numpy as np

from pagebus.bus.messages import RepetitionDetection


class RepetitionDetector:
    """Looks at the tokens of one sequence.

    For each pattern size p it keeps how many of the last tokens are the same as the one p places before. A pattern of
    p tokens has come ``min_count`` times in a row as soon as these are p * (min_count - 1).
    """

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._sizes = np.arange(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1)
        self._enough = self._sizes * (wanted.min_count - 1)
        self._same = np.zeros(len(self._sizes), np.int64)
        self._last = np.full(wanted.max_pattern_size, -1, np.int64)
        """The last tokens as a ring; -1: there has been none."""
        self._count = 0

    def push(self, token_id: int) -> bool:
        """Add the next token; returns whether the output now ends with a pattern that has come often enough."""
        before = self._last[(self._count - self._sizes) % len(self._last)]
        self._same = np.where(before == token_id, self._same + 1, 0)
        self._last[self._count % len(self._last)] = token_id
        self._count += 1
        return bool((self._same >= self._enough).any())
