"""Pipeline depth: the number of plans that a replica gets before their results are known."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

LEAST_DEPTH = 2
"""Enough while a step lasts longer than a plan takes to follow a result."""
AHEAD_S = 0.0025
"""How long the plans behind the running step should last. It exceeds the time from a result to the plan that it allows,
over the bus and through the scheduler: measured, usually 1.1 ms, and 2 ms in one of a hundred cases."""
NEWEST_SHARE = 0.25
"""Weight of the newest step of a kind in the average duration of that kind."""
IDLE, DECODES, PROMPTS = range(3)
"""Kinds of steps: without rows, decodes only, with prompts."""


class Pipeline:
    """The pipeline of one replica: two plans, and up to ``most`` while steps are short (``--pipeline-depth``).

    A step is expected to last as long as recent ones of its kind. So short steps behind a long prompt are planned ahead
    too: they will follow each other quickly.

    Of ``stages`` each has a plan, and one more is ready for the first.
    """

    def __init__(self, most: int, stages: int = 1) -> None:
        self._least = LEAST_DEPTH if stages == 1 else stages + 1
        self.most = most if stages == 1 else max(most, self._least)
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
        if depth < self._least:
            return depth < self.most
        return depth < self.most and sum(self._step_s[kind] for kind in islice(self._in_flight, 1, None)) < AHEAD_S

    def planned(self, num_rows: int, num_decodes: int) -> None:
        """Count one more plan in flight."""
        self._in_flight.append(IDLE if not num_rows else DECODES if num_rows == num_decodes else PROMPTS)

    def done(self, launched_s: float, done_s: float) -> None:
        """The oldest step in flight was launched and done at these times of its executor's clock."""
        kind, seconds = self._in_flight.popleft(), done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s
        if kind != IDLE:
            before_s = self._step_s[kind]
            known = math.isfinite(before_s)
            self._step_s[kind] = before_s + NEWEST_SHARE * (seconds - before_s) if known else seconds
