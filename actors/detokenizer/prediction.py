"""Counts how much of a client's prediction has come true: tokens of it that occur in the output, in its order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

ALIKE = 3
"""How many tokens in a row that stand further on in the prediction show that the output continues there."""


class PredictionMatcher:
    """Follows one output. Tokens that follow the prediction count. Where the output differs from it, tokens count again
    from the next place where ``ALIKE`` in a row are those of the prediction. The count depends on tokens alone, not on
    drafts, so it is the same after any crash."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(ALIKE, len(prediction) + 1):
            self._ends.setdefault(tuple(prediction[end - ALIKE : end]), []).append(end)
        self._next = 0
        self._others: list[int] = []
        """The newest tokens that did not count."""
        self.num_predicted = 0

    @property
    def num_unpredicted(self) -> int:
        """Tokens of the prediction that have not occurred so far."""
        return len(self._prediction) - self.num_predicted

    def push(self, token: int) -> None:
        """The next token of the output."""
        if self._next < len(self._prediction) and self._prediction[self._next] == token:
            self._next += 1
            self.num_predicted += 1
            self._others.clear()
            return
        self._others = [*self._others, token][-ALIKE:]
        ends = self._ends.get(tuple(self._others), ()) if len(self._others) == ALIKE else ()
        place = bisect_left(ends, self._next + ALIKE)
        if place < len(ends):
            self._next = ends[place]
            self.num_predicted += ALIKE
            self._others.clear()
