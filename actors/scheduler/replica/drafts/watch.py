"""Decides which steps look up drafts at all: each while some are accepted, and few where none are for long.

To look costs a step little, and a step of a small model on a CPU a few hundredths. Where nothing repeats itself this
buys nothing, so steps look for a while and rest for a while, ever longer. A text that begins to repeat itself is
noticed when the next look begins.
"""

from __future__ import annotations

PATIENCE = 64
"""Steps that look after a draft was accepted, and at the beginning."""
LOOK = 8
"""Steps of a look in which none has been accepted for long: what is found comes back, is planned and verified, while up
to four steps are in flight."""
LEAST_REST, MOST_REST = 8, 48
"""Steps between two looks, twice as many each time."""


class Watch:
    """Of one replica."""

    def __init__(self) -> None:
        self._left = PATIENCE
        self._rest = self._resting = LEAST_REST

    def looks(self) -> bool:
        """Whether the next step does. Call it once for each step with decodes."""
        if self._left:
            self._left -= 1
            return True
        self._resting -= 1
        if self._resting:
            return False
        self._left = LOOK
        self._rest = self._resting = min(2 * self._rest, MOST_REST)
        return False

    def wake(self) -> None:
        """A draft was accepted, or is likely to be: look from now on."""
        self._left, self._rest, self._resting = PATIENCE, LEAST_REST, LEAST_REST
