"""Tables of measured choices for experts: those that are shipped, and those of this machine's user.

A row has the experts (``experts``, ``top_k``, ``hidden``, ``width``), the ``model`` they were measured for if it is
shipped, and for each bucket of tokens the launch shapes of both products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, until_tables_change, user_path
from pagebus.kernels.linear.tables import read_rows, replace_in_row, write_rows
from pagebus.kernels.moe.launch.candidates import is_known
from pagebus.kernels.moe.launch.rule import by_rule
from pagebus.kernels.moe.launch.shapes import Config, Shape, buckets, pack, parse

TABLES = Path(__file__).with_name("tables")

Table = dict[Shape, dict[int, Config]]
"""Choices by experts and bucket."""


@until_tables_change
def load_table(path: Path) -> Table:
    """The choices in a file; empty if there is none.

    Raises:
        ValueError, TypeError, KeyError: the file is no table.
    """
    return {_shape(row): _choices(row) for row in read_rows(path)}


def _shape(row: dict[str, Any]) -> Shape:
    return Shape(*(int(row[name]) for name in Shape._fields))


def _choices(row: dict[str, Any]) -> dict[int, Config]:
    return {int(bucket): parse(stored) for bucket, stored in row["buckets"].items()}


def merge_table(path: Path, shape: Shape, choices: dict[int, Config], **about: str) -> None:
    """Put the choices for such experts into the table at ``path``; its others stay. ``about``: more of the row."""
    rows = {_shape(row): row for row in read_rows(path)}
    known = {**_choices(rows[shape]), **choices} if shape in rows else choices
    packed = {str(bucket): pack(known[bucket]) for bucket in sorted(known)}
    rows[shape] = {**shape._asdict(), **about, "buckets": packed}
    write_rows(path, (rows[each] for each in sorted(rows)))


def replace_bucket(path: Path, bucket: int, shape: Shape, config: Config | None) -> None:
    """Such experts have this choice for ``bucket`` in the table at ``path``, or (None) none of it; all else stays."""
    replace_in_row(path, shape._asdict(), bucket, None if config is None else pack(config))


def load_user_table(target: Target, folder: Path) -> Table:
    """A user's choices; empty if there are none, or if the file was damaged: it only makes steps faster."""
    try:
        table = load_table(user_path(target, folder, Tuned.EXPERTS))
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return {}
    return {shape: chosen for shape, chosen in table.items() if _is_usable(shape, chosen, target)}


def _is_usable(shape: Shape, chosen: dict[int, Config], target: Target) -> bool:
    """Whether these buckets exist, and their launch shapes are among those that are timed."""
    return all(
        bucket in buckets(shape)
        and (config == by_rule(bucket, shape, torch.bfloat16, target) or is_known(shape, config, target.capability))
        for bucket, config in chosen.items()
    )
