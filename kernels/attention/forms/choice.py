"""Chooses the form in which the decodes of a step attend: as measured where it was, else the usual one.

As in `pagebus.kernels.linear.dispatch`, a user's table comes before the shipped one, and nothing is timed while
serving.
"""

from __future__ import annotations

from typing import NamedTuple

from pagebus.kernels.attention.forms.form import USUAL, DecodeForm, DecodeHeads
from pagebus.kernels.attention.forms.tables import TABLES, Table, load_table, load_user_table
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import until_tables_change, user_folder
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.shapes import tokens_class
from pagebus.kernels.linear.tables import table_path


class FormChoice(NamedTuple):
    """A form, and which source it is from."""

    form: DecodeForm
    source: Source


def choose_form(num_rows: int, heads: DecodeHeads, target: Target | None) -> FormChoice:
    """The form of this many decodes in 16 bits, padding included."""
    return _choose(tokens_class(num_rows), heads, target)


@until_tables_change
def _choose(bucket: int, heads: DecodeHeads, target: Target | None) -> FormChoice:
    if target is not None:
        tables = (user_table(target), Source.USER), (load_table(table_path(target, TABLES)), Source.MEASURED)
        for table, source in tables:
            if bucket in table.get(heads, {}):
                return FormChoice(table[heads][bucket], source)
    return FormChoice(USUAL, Source.RULE)


@until_tables_change
def user_table(target: Target) -> Table:
    """What the user has measured on such a GPU."""
    folder = user_folder()
    return {} if folder is None else load_user_table(target, folder)
