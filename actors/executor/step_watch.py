"""Detects a hanging device: steps, or copies out of other executors, do not advance, though the process lives on."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagebus.bus.messages import StepPlan

LEAST_PATIENCE_S = 10.0
"""Patience at least: the first step of a shape may have to compile a kernel."""
PATIENCE = 3.0
"""The next step may take this many times as long as the longest one so far."""


class StepWatch:
    """Knows how long the executor has had steps to compute without finishing one, and how long its pulls have been on
    their way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight = self._step = self._epoch = 0
        self._waiting_since_s = 0.0
        self._longest_s = 0.0
        self._pulls: dict[int, float] = {}
        """When pulls without a report were ordered, by number."""

    def submitted(self, plan: StepPlan, scheduler_epoch: int) -> None:
        """There is one more step to compute."""
        now_s = self._clock()
        if scheduler_epoch != self._epoch:
            self._pulls.clear()  # nothing is said of those of the scheduler before
        if not self._in_flight:
            self._waiting_since_s = now_s
        self._in_flight, self._step, self._epoch = self._in_flight + 1, plan.step, scheduler_epoch
        for each in plan.pulls:
            self._pulls[each.pull] = now_s

    def done(self) -> None:
        """The oldest of the steps has been computed."""
        now_s = self._clock()
        self._longest_s = max(self._longest_s, now_s - self._waiting_since_s)
        self._in_flight, self._waiting_since_s = self._in_flight - 1, now_s

    def pulled(self, pull: int) -> None:
        """A pull has ended, in whatever way."""
        self._pulls.pop(pull, None)

    @property
    def stalled_s(self) -> float:
        """Seconds without a result if they are too many, else 0."""
        waited_s = self._clock() - self._waiting_since_s
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * self._longest_s)
        return waited_s if self._in_flight and waited_s > patience_s else 0.0

    def problem(self, limit_s: float) -> str:
        """What hangs, if anything has for longer than the limit. A pull that is only slow has been given up before."""
        if (stalled_s := self.stalled_s) > limit_s:
            return f"step {self._step - self._in_flight + 1} has not been computed for {stalled_s:.0f} s"
        pulled_s = self._clock() - min(self._pulls.values(), default=float("inf"))
        return f"blocks of another executor have been on their way for {pulled_s:.0f} s" if pulled_s > limit_s else ""
