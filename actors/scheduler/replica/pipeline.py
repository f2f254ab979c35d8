"""How many plans a replica is given before their results are known."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

LEAST_DEPTH = 2
"""Enough as long as a step lasts longer than a plan takes to follow a result."""
AHEAD_S = 0.0025
"""How long the plans behind the step that runs should last: longer than a result and the plan that it allows take over
the bus and through the scheduler, which was measured to be 1.1 ms mostly and 2 ms in one of a hundred cases."""
NEWEST_SHARE = 0.25
"""What the newest step of a kind counts for in how long such a step is taken to last."""
IDLE, DECODES, PROMPTS = range(3)
"""Kinds of steps: without rows, of decodes alone, with prompts."""


class Pipeline:
    """The pipeline of one replica: two plans, and up to ``most`` while steps are short (``--pipeline-depth``).

    Steps of a kind are taken to last as long as they did lately: behind a long prompt, the short steps that follow it
    are planned ahead too, as one after the other will be over in no time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._in_flight: deque[int] = deque()
        self._step_s = [0.0, math.inf, math.inf]
        self._last_done_s = 0.0

    def __len__(self) -> int:
        """Plans in flight."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether one more plan is wanted."""
        depth = len(self)
        if depth < LEAST_DEPTH:
            return depth < self.most
        return depth < self.most and sum(self._step_s[kind] for kind in islice(self._in_flight, 1, None)) < AHEAD_S

    def planned(self, num_rows: int, num_decodes: int) -> None:
        """One more plan is in flight."""
        self._in_flight.append(IDLE if not num_rows else DECODES if num_rows == num_decodes else PROMPTS)

    def done(self, launched_s: float, done_s: float) -> None:
        """The oldest step in flight was launched and done at these times of its executor's clock."""
        kind, seconds = self._in_flight.popleft(), done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s
        if kind != IDLE:
            before_s = self._step_s[kind]
            known = math.isfinite(before_s)
            self._step_s[kind] = before_s + NEWEST_SHARE * (seconds - before_s) if known else seconds
