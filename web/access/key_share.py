"""Bounds one API key's share of a common limit to half of what the other keys leave free.

A new key therefore always finds room, and nothing has to be taken from another key (dynamic thresholds: Choudhury and
Hahne, 1998). A key alone may use the whole limit.
"""

from __future__ import annotations

from collections.abc import Mapping


def key_share(limit: int, held: Mapping[str, int], key: str, *, alone: bool) -> int:
    """The most that ``key`` may hold of ``limit``, given what all keys hold; below 0 if the others hold more than
    that."""
    left = limit - sum(held.values()) + held.get(key, 0)
    return left if alone else left // 2
