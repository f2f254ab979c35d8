"""Which form of exchange a sum takes, by its size: from one table, so that all ranks choose alike."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pagebus.kernels.exchange.peers import FORMS, Limits

TABLE = Path(__file__).with_name("choices.json")
"""Per number of ranks, for sums alone and for those with a norm: rows in the order of ``up_to`` bytes. Larger sums go
in pieces."""


class Choice(NamedTuple):
    """``up_to``: bytes of the largest sum that this is for. ``form``: of :data:`FORMS`. ``blocks``: the most blocks of
    the grid. ``warps`` per block, at most. ``columns``: elements of a row, where rows are free to choose. For
    ``two_shot`` alone, ``tile``: elements of a block at a time, but at least a row; ``turns`` of a call, at most."""

    up_to: int
    form: str
    blocks: int
    warps: int
    columns: int = 2048
    tile: int = 1
    turns: int = 1


@cache
def choices(world: int, norm: bool) -> tuple[Choice, ...]:
    """The rows of the table for ``world`` ranks, or for the next larger number that it has."""
    table = json.loads(TABLE.read_text())
    known = min((int(key) for key in table if int(key) >= world), default=max(map(int, table)))
    rows = tuple(Choice(**row) for row in table[str(known)]["norm" if norm else "sum"])
    assert all(row.form in FORMS for row in rows)
    return rows


def choice_for(num_bytes: int, world: int, limits: Limits, *, norm: bool) -> Choice:
    """The form for a sum of ``num_bytes`` over ``world`` ranks, whose areas have ``limits``."""
    rows = choices(world, norm)
    for row in rows:
        if num_bytes <= min(row.up_to, getattr(limits, row.form)):
            return row
    return rows[-1]
