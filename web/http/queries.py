"""Reads parameters of a query, whose values are all text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pagebus.web.http.errors import bad_field

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def switch(query: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """A parameter that is on or off, in any of the usual words.

    Raises:
        ApiError: 400, it is something else.
    """
    value = query.get(name, str(default)).lower()
    if value not in TRUE + FALSE:
        raise bad_field(name, "must be true or false")
    return value in TRUE


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """The length of a page that is asked for.

    Raises:
        ApiError: 400, it is no number from 1 to ``most``.
    """
    given = query.get("limit", f"{default}")
    if not re.fullmatch(r"[0-9]{1,6}", given) or not 1 <= int(given) <= most:
        raise bad_field("limit", f"must be from 1 to {most}")
    return int(given)
