"""What has happened to the deployment lately: who died, came back or took over, and since when requests had to wait.

An ingress writes it down from the leases that it sees, and knows nothing of the time before its own start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

KEPT = 20
SEEN_S = 10.0
"""Seconds between two readings of a counter after which the time of its growth counts as unknown."""
JOINED, DIED, ENDED, BACK, RENEWED, MOVED = "joined", "died", "ended", "back", "renewed", "moved"
RESUMED, OUTAGE, ANSWERED = "resumed", "outage", "answered"


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that has happened.

    ``what``: an actor ``joined``, ``died``, ``ended`` (it was told to), is ``back`` (a new life of it is ready),
    has ``renewed`` a lease that had ended (the same life), or took an exclusive role over (``moved``, from ``before``);
    ``count`` sequences of a lost executor were ``resumed``; an ``outage`` began for want of ``missing``, and requests
    are ``answered`` again. ``after_s``: seconds since the end of the last life, or since the outage began.
    """

    at_s: float
    what: str
    actor: str = ""
    after_s: float | None = None
    before: str = ""
    missing: tuple[str, ...] = ()
    count: int = 0


class Chronicle:
    """The last :data:`KEPT` incidents."""

    def __init__(self) -> None:
        self._kept: deque[Incident] = deque(maxlen=KEPT)
        self._resumed = (-math.inf, 0.0)
        """When the schedulers were read last, and what they had counted."""
        self._missing: tuple[str, ...] | None = None
        self._outage_s = 0.0

    def note(self, incident: Incident) -> None:
        self._kept.append(incident)

    def newest(self) -> list[Incident]:
        """All that is kept, the newest first."""
        return list(reversed(self._kept))

    def resumed(self, total: float, now_s: float) -> None:
        """Note that the schedulers' count of resumed sequences has reached ``total``. After a pause nobody knows when
        that was."""
        (read_s, before), self._resumed = self._resumed, (now_s, total)
        if total > before and now_s - read_s < SEEN_S:
            self.note(Incident(now_s, RESUMED, count=int(total - before)))

    def lacks(self, missing: Sequence[str], now_s: float) -> None:
        """Note what keeps requests from being answered. What is missing before the first answer is no outage: the
        deployment starts."""
        if not missing:
            if self._missing:
                self.note(Incident(now_s, ANSWERED, after_s=now_s - self._outage_s))
            self._missing = ()
        elif self._missing == ():
            self._outage_s, self._missing = now_s, tuple(missing)
            self.note(Incident(now_s, OUTAGE, missing=self._missing))
