"""Scheduling order: of waiting sequences, of prefill chunks and, reversed, of preemption victims.

A request has a *priority class*, 0 for interactive requests and 1 for jobs, and a *deadline*::

    deadline_s = arrived_s + aging_s * priority                      (interactive)
    deadline_s = arrived_s + aging_s * (JOB_STEPS + priority)        (job; priority not below -JOB_BOOST)

The order is that of (priority_class, deadline_s, order of arrival).

**Requests age, and yet the order is static.** With ageing, a request that has waited for w seconds gains ``w /
aging_s`` steps of priority: at time t its aged priority is ``priority - (t - arrived_s) / aging_s``. That equals
``(deadline_s - t) / aging_s``. The term t is the same for all requests, so comparing deadlines compares aged priorities
at every t. The queue is never sorted again, and a request is inserted once, by binary search.

**There is no starvation.** From the time ``deadline_s - aging_s * p``, every new request with a priority number of p or
more is ordered behind this one. So a finite number of requests precede it. They end one after another, because the
first of all is never preempted and always gets blocks and tokens.

**Jobs** follow all interactive requests, whatever their priority and waiting time. But once per ``aging_s`` the first
job whose deadline has passed, running or waiting, is *promoted*: it becomes an interactive request that arrives now
with priority 0. A single old job is promoted at once. Of a hundred thousand old jobs, one per ``aging_s`` is promoted.
So a large batch neither starves behind interactive traffic nor overtakes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Key = tuple[int, float, int]
"""(priority class, deadline in seconds, order of arrival): smaller goes first."""
INTERACTIVE, JOB = 0, 1
JOB_STEPS = 20
"""The deadline of a job of priority 0 is this many priority steps after that of an interactive request arriving with
it."""
JOB_BOOST = 10
"""The lowest effective priority number of a job is minus this, so no job's deadline has passed when it arrives."""


@dataclass(frozen=True, slots=True)
class Order:
    """``aging_s`` > 0 is the wait that makes up for one step of priority. Without ``priorities`` (first come, first
    served) all requests have priority 0."""

    priorities: bool = True
    aging_s: float = 30.0

    def deadline_s(self, arrived_s: float, priority: int, *, is_job: bool) -> float:
        """When a request is due, in seconds of the clock that ``arrived_s`` is of."""
        steps = priority if self.priorities else 0
        if is_job:
            steps = JOB_STEPS + max(steps, -JOB_BOOST)
        return arrival(arrived_s) + self.aging_s * steps


def arrival(arrived_s: float) -> float:
    """The time of arrival in a message; 0 if it is not a finite number."""
    return arrived_s if math.isfinite(arrived_s) else 0.0
