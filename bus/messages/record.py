"""The base class of all messages and of their parts."""

from __future__ import annotations

from msgspec import Struct


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An immutable value with typed fields. The bus checks the types of what it reads, and leaves defaults out.

    A class of records is declared with ``frozen=True, kw_only=True`` of its own, so that type checkers see it too.
    Change a copy with :func:`msgspec.structs.replace`.
    """
