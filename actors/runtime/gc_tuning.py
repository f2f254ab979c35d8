"""Tunes Python's garbage collector: rare collections while an actor starts, and none of the objects made by the
start."""

from __future__ import annotations

import gc

USUAL_THRESHOLDS = gc.get_threshold()
START_THRESHOLD = 200_000
"""New objects between two collections while an actor starts: imported objects stay, and scanning them is slow."""


def collect_seldom() -> None:
    """Collect rarely during a start."""
    gc.set_threshold(START_THRESHOLD)


def keep_what_is_there() -> None:
    """Once an actor is ready: collect as usual, but never scan the objects made by the start."""
    gc.freeze()
    gc.set_threshold(*USUAL_THRESHOLDS)
