"""Time that stands still with the process, for what only ends the dead: leases, and views of who is there.

On a busy machine a test's process may get no processor for seconds. Everything in it stands still then, the actors that
it runs too; when it goes on they have not died.
"""

from __future__ import annotations

import time

from pagebus.bus.memory.server import MemoryServer

MOST_S = 0.25
"""Of what passes between two looks at the clock: more, and the process stood still."""


class PatientClock:
    """Monotonic seconds, without those in which nobody could look."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._now_s = 0.0

    def __call__(self) -> float:
        now_s = time.monotonic()
        self._now_s += min(now_s - self._looked_s, MOST_S)
        self._looked_s = now_s
        return self._now_s


def leases_in_memory() -> None:
    """From now on, servers in memory that are given no clock have this one."""
    MemoryServer.__init__.__defaults__ = (PatientClock(),)


def views_of_ingresses() -> None:
    """From now on, ingresses of this process have this clock for how old their view of the leases is."""
    from pagebus.web.ingress.membership import Membership

    defaults = Membership.__init__.__kwdefaults__
    assert defaults is not None
    defaults["clock"] = PatientClock()
