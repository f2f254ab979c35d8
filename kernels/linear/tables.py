"""Tables of measured choices: those that are shipped, one for each kind of GPU, and those of this machine's user."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import forget_choices, until_tables_change, user_path
from pagebus.kernels.linear.shapes import BUCKETS, FORMS, PROMPT_BUCKETS, Config, Product, is_legal, pack, parse

TABLES = Path(__file__).with_name("tables")

Table = dict[Product, dict[int, Config | None]]
"""Choices by product and bucket; None: the library."""


def table_path(target: Target, folder: Path = TABLES) -> Path:
    """The path of the shipped table for a kind of GPU."""
    return folder / f"sm_{target.capability}_{target.num_multiprocessors}.json"


@until_tables_change
def load_table(path: Path) -> Table:
    """The choices in a file; empty if there is none.

    Raises:
        ValueError, TypeError, KeyError: the file is no table.
    """
    return {
        _product(row): {int(bucket): parse(stored) for bucket, stored in row["buckets"].items()}
        for row in read_rows(path)
    }


def merge_table(path: Path, product: Product, choices: dict[int, Config | None]) -> None:
    """Put the choices for one product into the table at ``path``, one line for each product; its others stay."""
    table = load_table(path)
    _write(path, {**table, product: {**table.get(product, {}), **choices}})


def replace_bucket(
    path: Path, bucket: int, products: Iterable[Product], choices: Mapping[Product, Config | None]
) -> None:
    """Of these products, the table at ``path`` has for ``bucket`` what ``choices`` have, and nothing of those that they
    lack; all else stays."""
    table = {product: dict(chosen) for product, chosen in load_table(path).items()}
    for product in products:
        table.get(product, {}).pop(bucket, None)
    for product, config in choices.items():
        table.setdefault(product, {})[bucket] = config
    _write(path, {product: chosen for product, chosen in table.items() if chosen})


def _write(path: Path, table: Table) -> None:
    write_rows(
        path,
        (
            {**product._asdict(), "buckets": {bucket: pack(config) for bucket, config in sorted(chosen.items())}}
            for product, chosen in sorted(table.items())
        ),
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; none if there is no file. Raises ValueError: it is damaged."""
    return list(json.loads(path.read_text())) if path.is_file() else []


def replace_in_row(path: Path, named: dict[str, Any], bucket: int, stored: dict[str, Any] | None) -> None:
    """The row with the fields ``named`` has ``stored`` for ``bucket`` in the table at ``path``, or (None) nothing;
    all else stays."""
    rows = {tuple(row[name] for name in named): row for row in read_rows(path)}
    key = tuple(named.values())
    row = rows.get(key, {**named, "buckets": {}})
    kept = {each: found for each, found in row["buckets"].items() if int(each) != bucket}
    kept |= {} if stored is None else {str(bucket): stored}
    rows[key] = {**row, "buckets": {each: kept[each] for each in sorted(kept, key=int)}}
    write_rows(path, (rows[each] for each in sorted(rows) if rows[each]["buckets"]))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Make a table of these rows, a line for each. Choices depend on it from now on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")  # readers see the old table or the new one
    beside.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    beside.replace(path)
    forget_choices()


def _product(row: dict[str, Any]) -> Product:
    if row["form"] not in FORMS:
        raise ValueError(f"no form of a product: {row['form']!r}")
    return Product(row["form"], int(row["rows"]), int(row["inputs"]), str(row.get("layout", "")))


def load_user_table(target: Target, folder: Path) -> Table:
    """A user's choices; empty if there are none, or if the file was damaged: it only makes steps faster."""
    try:
        table = load_table(user_path(target, folder))
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return {}
    return {product: chosen for product, chosen in table.items() if _is_usable(product, chosen)}


def _is_usable(product: Product, chosen: dict[int, Config | None]) -> bool:
    return all(
        bucket in (*BUCKETS, *PROMPT_BUCKETS) and (config is None or is_legal(product, bucket, config))
        for bucket, config in chosen.items()
    )
