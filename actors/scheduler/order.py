"""Who goes first: the order of waiting sequences, of prefill chunks, and (reversed) of preemption victims.

A request has a *level*, 0 for interactive requests and 1 for jobs, and a time at which it is *due*::

    due_s = arrived_s + aging_s * priority                      (interactive)
    due_s = arrived_s + aging_s * (JOB_STEPS + priority)        (job; priority not below -JOB_BOOST)

and the order is that of (level, due_s, order of arrival).

**This is ageing, and yet the order is static.** With ageing, a request that has waited for w seconds stands
``w / aging_s`` steps better than its priority number says: at time t it stands at ``priority - (t - arrived_s) /
aging_s``. That is ``(due_s - t) / aging_s``, so at every t, two requests compare as their ``due_s`` do: t is the same
for both. Nothing has to be sorted again as time passes, and a request takes its place once, by binary search.

**Nobody starves.** After the time ``due_s - aging_s * p``, whatever arrives with a priority number of p or more stands
behind. So a request has finitely many others before it, and these end one after another: the first of all is never
preempted and always gets blocks and tokens.

**Jobs** stand behind all interactive requests, however long these wait or whatever their priority. But once per
``aging_s`` the first of the jobs that are due by then (running or waiting) is *promoted*: it becomes an interactive
request that arrives now with priority 0. A job that has grown old alone is promoted at once; of a hundred thousand jobs
that have, one per ``aging_s`` is, so a large batch neither starves behind interactive traffic nor overtakes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Key = tuple[int, float, int]
"""(level, due_s, order): smaller goes first."""
INTERACTIVE, JOB = 0, 1
JOB_STEPS = 20
"""A job of priority 0 is due this many steps of priority after an interactive request that arrives with it."""
JOB_BOOST = 10
"""Priority numbers of jobs count down to minus this: so no job is born old."""


@dataclass(frozen=True, slots=True)
class Order:
    """``aging_s`` > 0 is the wait that makes up for one step of priority. Without ``priorities`` (first come, first
    served) all requests have priority 0."""

    priorities: bool = True
    aging_s: float = 30.0

    def due_s(self, arrived_s: float, priority: int, *, is_job: bool) -> float:
        """When a request is due, in seconds of the clock that ``arrived_s`` is of."""
        steps = priority if self.priorities else 0
        if is_job:
            steps = JOB_STEPS + max(steps, -JOB_BOOST)
        return arrival(arrived_s) + self.aging_s * steps


def arrival(arrived_s: float) -> float:
    """A time of arrival that comes over the bus; 0 if it is none."""
    return arrived_s if math.isfinite(arrived_s) else 0.0
