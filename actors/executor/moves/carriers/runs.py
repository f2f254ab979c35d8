"""Joins neighbouring blocks, so that they are copied in one piece."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagebus.bus.messages import Int32Array

Run = tuple[int, int, int]
"""(first source, first target, how many)."""


def runs(sources: Int32Array, targets: Int32Array, most: int, per_chunk: int = 0) -> list[Run]:
    """The pairs in their order, joined where both are neighbours, in runs of at most ``most``. ``per_chunk``: sources
    of different chunks of this many blocks are no neighbours."""
    if not len(sources):
        return []
    places = np.arange(len(sources))
    begins = np.ones(len(sources), np.bool_)
    begins[1:] = (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
    if per_chunk:
        begins[1:] |= sources[1:] // per_chunk != sources[:-1] // per_chunk
    since = places - np.maximum.accumulate(np.where(begins, places, 0))
    (firsts,) = (since % most == 0).nonzero()
    counts = np.append(firsts[1:], len(sources)) - firsts
    return list(zip(sources[firsts].tolist(), targets[firsts].tolist(), counts.tolist(), strict=True))


def num_last(joined: list[Run], num_blocks: int, most: int) -> int:
    """The number of runs at the end, at most ``most``, that together have at most ``num_blocks`` blocks."""
    count, left = 0, num_blocks
    for _, _, length in joined[: -most - 1 : -1]:
        left -= length
        if left < 0:
            break
        count += 1
    return count


def chunks(ids: Int32Array, most: int) -> Iterator[Int32Array]:
    """Parts of at most ``most``."""
    for start in range(0, len(ids), most):
        yield ids[start : start + most]
