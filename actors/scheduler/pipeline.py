"""How many plans a replica is given before their results are known."""

from __future__ import annotations

import math

LEAST_DEPTH = 2
"""Enough as long as a step lasts longer than a plan takes to follow a result."""
AHEAD_S = 0.0025
"""How long the plans behind the step that runs should last: longer than a result and the plan that it allows take over
the bus and through the scheduler, which was measured to be 1.1 ms mostly and 2 ms in one of a hundred cases."""


class Pipeline:
    """The pipeline of one replica: two plans, and up to ``most`` while steps are short (``--pipeline-depth``)."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._step_s = math.inf
        self._last_done_s = 0.0

    def done(self, launched_s: float, done_s: float) -> None:
        """The next step was launched and done at these times of its executor's clock."""
        self._step_s = done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s

    def has_room(self, in_flight: int) -> bool:
        """Whether one more plan is wanted behind ``in_flight`` others. Steps are taken to last as long as the last."""
        if in_flight < LEAST_DEPTH:
            return in_flight < self.most
        return in_flight < self.most and (in_flight - 1) * self._step_s < AHEAD_S
