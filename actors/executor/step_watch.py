"""Detects a hanging device: steps do not advance while there are steps to compute, though the process lives on."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_PATIENCE_S = 10.0
"""Before anything is known of how long steps take: the first one of a shape may have to compile a kernel."""
PATIENCE = 3.0
"""How many times as long as the longest step so far the next one may take."""


class StepWatch:
    """Knows how long the executor has had steps to compute without finishing one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight = 0
        self._waiting_since_s = 0.0
        self._longest_s = 0.0

    def submitted(self) -> None:
        """There is one more step to compute."""
        if not self._in_flight:
            self._waiting_since_s = self._clock()
        self._in_flight += 1

    def done(self) -> None:
        """The oldest of the steps has been computed."""
        now_s = self._clock()
        self._longest_s = max(self._longest_s, now_s - self._waiting_since_s)
        self._in_flight, self._waiting_since_s = self._in_flight - 1, now_s

    @property
    def in_flight(self) -> int:
        """Steps without a result."""
        return self._in_flight

    @property
    def stalled_s(self) -> float:
        """Seconds without a result if they are too many, else 0."""
        waited_s = self._clock() - self._waiting_since_s
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * self._longest_s)
        return waited_s if self._in_flight and waited_s > patience_s else 0.0
