"""What one key may have of what all share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagebus.web.access.key_share import key_share


def test_a_key_has_half_of_what_others_leave() -> None:
    """Its own does not count against it; where there are no other keys it has all."""
    assert key_share(100, {}, "a", alone=False) == 50
    assert key_share(100, {"a": 40}, "a", alone=False) == 50
    assert key_share(100, {"a": 40, "b": 30}, "b", alone=False) == 30
    assert key_share(100, {"a": 40}, "a", alone=True) == 100
    assert key_share(100, {"a": 40, "gone": 130}, "a", alone=False) < 0


@given(st.integers(1, 10**6), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 10**6)), max_size=30))
def test_whoever_comes_next_finds_room(limit: int, asked: list[tuple[str, int]]) -> None:
    """However much is asked for, by whomever: each key that holds something leaves half of what it found."""
    held: dict[str, int] = {}
    for key, more in asked:
        mine = held.get(key, 0)
        held[key] = max(mine, min(mine + more, key_share(limit, held, key, alone=False)))
    assert (limit - sum(held.values())) * 2 ** len(held) >= limit
