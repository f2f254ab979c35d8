"""What one API key may have of what all keys share: half of what the others leave.

So a key that comes next finds room whatever one other holds, and nobody's has to be taken away for that (dynamic
thresholds: Choudhury and Hahne, 1998). Where there are no other keys, it may have all.
"""

from __future__ import annotations

from collections.abc import Mapping


def key_share(limit: int, held: Mapping[str, int], key: str, *, alone: bool) -> int:
    """The most that ``key`` may have of ``limit``, beside what the others hold; below 0 if they hold more than that."""
    left = limit - sum(held.values()) + held.get(key, 0)
    return left if alone else left // 2
