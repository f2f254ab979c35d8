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
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.scheduler.sequence import Request

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


class Jobs:
    """The jobs that have not been promoted, first due first."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._keys: list[tuple[float, str]] = []
        self._requests: dict[tuple[float, str], Request] = {}
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, request: Request) -> None:
        """A job has arrived."""
        key = request.due_s, request.id
        insort(self._keys, key)
        self._requests[key] = request

    def discard(self, request: Request) -> None:
        """A request has ended; nothing happens if it is no job."""
        key = request.due_s, request.id
        if self._requests.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def pop_due(self, now_s: float) -> Request | None:
        """The job to promote now, if there is one: it is no job any more then."""
        if not self._keys or self._keys[0][0] > now_s or now_s < self._next_s:
            return None
        self._next_s = now_s + self._aging_s
        return self._requests.pop(self._keys.pop(0))

    def check_integrity(self) -> None:
        """The order holds, and all are jobs that live.

        Raises:
            AssertionError: it is not so.
        """
        assert self._keys == sorted(self._requests), "keys and jobs differ"
        for (due_s, name), request in self._requests.items():
            assert (request.due_s, request.id) == (due_s, name), f"job {name} is listed under a wrong key"
            assert request.level == JOB, f"job {name} was promoted"
            assert request.num_live, f"job {name} is over"
