"""Operators' holds and cache resets: ingresses ask over ``control``; answers arrive in their mailboxes."""

from __future__ import annotations

from pagebus.bus.messages.record import Record

HOLD_NONE, HOLD_KEEP, HOLD_WAIT, HOLD_ABORT = "", "keep", "wait", "abort"
"""How an operator holds the work. NONE: not at all. KEEP: running requests stand still, and new ones wait. WAIT: new
requests are refused, and running ones finish. ABORT: new requests are refused, and running ones are cancelled. With
the last two, jobs stand still once no client's request is left."""
HOLDS = (HOLD_NONE, HOLD_KEEP, HOLD_WAIT, HOLD_ABORT)
HOLD_STATE = "hold"
"""State on the bus with the present hold, ``{"mode": ...}``: a scheduler that takes over continues it."""
SLEEP_STATE = "sleep"
"""State on the bus while executors sleep, ``{"level": ..., "woken": [...]}``: an executor that starts waits until it is
gone."""


class HoldRequested(Record, frozen=True, kw_only=True):
    """Set the ``mode``, one of :data:`HOLDS`; None only asks for it. The answer repeats ``serial``."""

    ingress: str
    serial: int
    mode: str | None = None


class CacheResetRequested(Record, frozen=True, kw_only=True):
    """Forget all cached blocks of the devices; with ``host``, those of the host tiers too. ``running``: also compute
    running sequences again."""

    ingress: str
    serial: int
    host: bool = False
    running: bool = False


class HoldState(Record, frozen=True, kw_only=True):
    """``mode``: how the work is held. ``at_rest``: nothing is computed, and nothing will be while the mode stays."""

    serial: int
    mode: str
    at_rest: bool
