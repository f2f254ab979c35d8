"""Joins neighbouring blocks, so that they are copied in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pagebus.bus.messages import Int32Array

Run = tuple[int, int, int]
"""(first source, first target, how many)."""


def runs(sources: Int32Array, targets: Int32Array, most: int, per_chunk: int = 0) -> list[Run]:
    """The pairs in their order, joined where both are neighbours, in runs of at most ``most``. ``per_chunk``: of so
    many sources the last is no neighbour of the next."""
    if not len(sources):
        return []
    apart = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    if per_chunk:
        apart |= np.diff(sources // per_chunk) != 0
    breaks = np.flatnonzero(apart) + 1
    bounds = [0, *breaks.tolist(), len(sources)]
    joined: list[Run] = []
    for first, end in pairwise(bounds):
        for start in range(first, end, most):
            joined.append((int(sources[start]), int(targets[start]), min(most, end - start)))
    return joined


def chunks(ids: Int32Array, most: int) -> Iterator[Int32Array]:
    """Parts of at most ``most``."""
    for start in range(0, len(ids), most):
        yield ids[start : start + most]
