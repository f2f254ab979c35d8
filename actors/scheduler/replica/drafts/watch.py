"""Decides which steps look up drafts: every step while some are accepted, and fewer the longer none are.

A lookup costs a step little, and a few hundredths of a step with a small model on a CPU. Where text does not repeat
itself, it is in vain. So steps look for a while, then rest for a while, each rest longer than the last. A text that
begins to repeat itself is noticed at the next look.
"""

from __future__ import annotations

PATIENCE = 64
"""Steps that look after a draft was accepted, and at the beginning."""
LOOK = 8
"""Steps of a later look: enough for drafts to be reported, planned and verified, with up to four steps in flight."""
LEAST_REST, MOST_REST = 8, 48
"""Steps between two looks, doubled each time."""


class Watch:
    """The watch of one replica."""

    def __init__(self) -> None:
        self._left = PATIENCE
        self._rest = self._resting = LEAST_REST

    def looks(self) -> bool:
        """Whether the next step looks up drafts. Call it once for each step with decodes."""
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
