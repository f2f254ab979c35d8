"""Whose fault it is that the scheduler fails: the request that it was busy with.

A request that the core has accepted may, by an error of ours, make it raise as it plans, and would do so to every
successor, which meets the same state. So the last thing a failing scheduler says is which request that was; one that is
blamed :data:`MOST_BLAMES` times is given up. It is read from the traceback, so nothing is noted while all is well.
"""

from __future__ import annotations

from types import FrameType

from pagebus.actors.scheduler.request import BeamGroup, Request, Sequence

MOST_BLAMES = 2


def blamed(error: BaseException) -> Request | None:
    """The request that the innermost call which had one at hand was busy with, of those that led to ``error``."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        found = _at_hand(traceback.tb_frame) or found
        traceback = traceback.tb_next
    return found


def _at_hand(frame: FrameType) -> Request | None:
    """The request a call took up last: local variables are in the order of the code, arguments first."""
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
