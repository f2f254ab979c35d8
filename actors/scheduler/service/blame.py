"""Finds the request that a failing scheduler was working on.

By a bug, an accepted request may make the core raise while it plans, and would do so in every successor, which reaches
the same state. So a failing scheduler's last message names that request, and one blamed :data:`MOST_BLAMES` times is
given up. The request is read from the traceback, so there is no cost while all is well.
"""

from __future__ import annotations

from types import FrameType

from pagebus.actors.scheduler.request import BeamGroup, Request, Sequence

MOST_BLAMES = 2


def blamed(error: BaseException) -> Request | None:
    """The request that the innermost call with one in its local variables worked on, among those that led to
    ``error``."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        found = _at_hand(traceback.tb_frame) or found
        traceback = traceback.tb_next
    return found


def _at_hand(frame: FrameType) -> Request | None:
    """The request that a call took up last: local variables are in the order of the code, arguments first."""
    found = None
    for value in frame.f_locals.values():
        match value:
            case Request():
                found = value
            case Sequence():
                found = value.request
            case BeamGroup():
                found = value.leader.request
            case _:
                pass
    return found
