"""When an executor that drains may end: others may still want blocks of its cache."""

from __future__ import annotations

import time

from pagebus.bus.contract import Bus, BusUnavailable
from pagebus.bus.messages import StepPlan

PATIENCE_S = 5.0
"""Longest time for which a draining executor stays so that others can pull from it."""
SCHEDULER = "scheduler"
"""The kind of the scheduler's lease."""


class Leaving:
    """Of one executor, which has ``drain_timeout_s`` for all of its drain."""

    def __init__(self, drain_timeout_s: float) -> None:
        self._patience_s = min(PATIENCE_S, drain_timeout_s / 2)
        self._until_s: float | None = None
        self._had_last = False

    def take(self, plan: StepPlan) -> None:
        """Note a plan that was read."""
        self._had_last |= plan.is_last

    async def may_stay(self, bus: Bus) -> bool:
        """Whether others may still pull: the scheduler has not said otherwise, one is there, and there is time. The
        first call begins the stay."""
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + self._patience_s
        if self._had_last or now_s >= self._until_s:
            return False
        try:
            return bool(await bus.leases(SCHEDULER))
        except BusUnavailable:
            return False
