"""Operators' holds and cache resets: ingresses ask over ``control``; answers arrive in their mailboxes."""

from __future__ import annotations

from pagebus.bus.messages.record import Record

HOLD_NONE, HOLD_KEEP, HOLD_WAIT, HOLD_ABORT = "", "keep", "wait", "abort"
"""Nothing is held; what there is stands still, and what comes waits; what is new is refused, and what there is ends by
itself; or is ended. Of the latter two, jobs are held once no request of a client is left."""
HOLDS = (HOLD_NONE, HOLD_KEEP, HOLD_WAIT, HOLD_ABORT)
HOLD_STATE = "hold"
"""Name under which the present hold lies on the bus, ``{"mode": ...}``: a scheduler that takes over goes on with it."""
SLEEP_STATE = "sleep"
"""Name under which lies that executors sleep, ``{"level": ..., "woken": [...]}``: one that starts waits till it is
gone."""


class HoldRequested(Record, frozen=True, kw_only=True):
    """``mode`` is one of :data:`HOLDS` from now on; None: it is only asked for. ``serial`` comes back in the answer."""

    ingress: str
    serial: int
    mode: str | None = None


class CacheResetRequested(Record, frozen=True, kw_only=True):
    """Nothing that is cached may be found any more. ``host``: in the host tier, too. ``running``: what runs is computed
    again."""

    ingress: str
    serial: int
    host: bool = False
    running: bool = False


class HoldState(Record, frozen=True, kw_only=True):
    """``mode``: how the work is held. ``at_rest``: nothing is computed, and nothing will be before that is changed."""

    serial: int
    mode: str
    at_rest: bool
