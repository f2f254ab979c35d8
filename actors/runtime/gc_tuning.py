"""Tunes Python's garbage collector: rare collections while an actor starts, and none of the objects made by the
start."""

from __future__ import annotations

import gc

USUAL_THRESHOLDS = gc.get_threshold()
START_THRESHOLD = 200_000
"""New objects between two collections while an actor starts: what imports make stays, and it takes long to look at."""


def collect_seldom() -> None:
    """For the time of a start."""
    gc.set_threshold(START_THRESHOLD)


def keep_what_is_there() -> None:
    """Once an actor is ready: collect garbage as usual, but never look at what the start has made."""
    gc.freeze()
    gc.set_threshold(*USUAL_THRESHOLDS)
