"""A wall clock that does not jump: deadlines and ages are made of it, and it can be compared with those of others."""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def steady_time_s() -> float:
    """Seconds since 1970, as the wall clock had them when this process began, and evenly from then on."""
    return _BEGAN_S + time.monotonic()
