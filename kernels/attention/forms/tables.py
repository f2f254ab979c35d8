"""Tables of measured forms: those that are shipped, and those of this machine's user.

A row has the heads (``kv_heads``, ``group``, ``head_dim``, ``cache_bytes``), the ``model`` that they were measured for
if it is shipped, and for each bucket of rows a form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagebus.kernels.attention.forms.form import FORMS, DecodeForm, DecodeHeads
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, until_tables_change, user_path
from pagebus.kernels.linear.shapes import BUCKETS
from pagebus.kernels.linear.tables import read_rows, replace_in_row

TABLES = Path(__file__).with_name("tables")

Table = dict[DecodeHeads, dict[int, DecodeForm]]
"""Forms by heads and bucket."""


@until_tables_change
def load_table(path: Path) -> Table:
    """The forms in a file; empty if there is none.

    Raises:
        ValueError, TypeError, KeyError: the file is no table.
    """
    return {_heads(row): _forms(row) for row in read_rows(path)}


def _heads(row: dict[str, Any]) -> DecodeHeads:
    return DecodeHeads(*(int(row[name]) for name in DecodeHeads._fields))


def _forms(row: dict[str, Any]) -> dict[int, DecodeForm]:
    return {int(rows): DecodeForm(**stored) for rows, stored in row["buckets"].items()}


def replace_bucket(path: Path, bucket: int, heads: DecodeHeads, form: DecodeForm | None) -> None:
    """Such heads have this form for ``bucket`` in the table at ``path``, or (None) none of it; all else stays."""
    replace_in_row(path, heads._asdict(), bucket, None if form is None else form._asdict())


def load_user_table(target: Target, folder: Path) -> Table:
    """A user's forms; empty if there are none, or if the file was damaged: it only makes steps faster."""
    try:
        table = load_table(user_path(target, folder, Tuned.ATTENTION))
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return {}
    return {heads: forms for heads, forms in table.items() if _are_usable(forms)}


def _are_usable(forms: dict[int, DecodeForm]) -> bool:
    return set(forms) <= {*BUCKETS} and set(forms.values()) <= {*FORMS}
