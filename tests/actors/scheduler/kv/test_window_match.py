"""Matches behind a sliding window: the longest that there is, by as few lookups as promised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.scheduler.kv.prefix_index import page_keys
from pagebus.actors.scheduler.kv.window_match import match_window

PLACES = st.sets(st.integers(0, 19))


def longest(device: set[int], host: set[int], limit: int, num_matched: int) -> int:
    """Blocks of the longest prefix whose last ones are found: on the device, then perhaps on the host."""
    for end in range(limit, 0, -1):
        last = range(max(0, end - num_matched), end)
        for split in range(last.start, end + 1):
            if device >= {*last} - {*range(split, end)} and host >= {*range(split, end)}:
                return end
    return 0


@given(PLACES, PLACES, st.integers(0, 20), st.integers(1, 8))
def test_the_longest_match_is_found(device: set[int], host: set[int], limit: int, num_matched: int) -> None:
    """As by trying every prefix and every place where the host's blocks may begin."""
    hashes = [bytes([place]) for place in range(20)]
    blocks = {hashes[place]: 100 + place for place in device}
    hosts = {hashes[place]: 200 + place for place in host}

    match = match_window(blocks.get, hosts.get, hashes, limit, num_matched)

    assert match.num_blocks == longest(device, host, limit, num_matched)
    assert match.first == max(0, match.num_blocks - num_matched)
    split = match.first + len(match.cached)
    assert match.cached == [100 + place for place in range(match.first, split)]
    assert match.hosts == [200 + place for place in range(split, match.num_blocks)]


@given(st.lists(PLACES, min_size=2, max_size=2), st.integers(0, 20), st.integers(1, 8))
def test_blocks_of_several_pages_need_all_of_them(pages: list[set[int]], limit: int, num_matched: int) -> None:
    """A block that lacks one is none."""
    hashes = [bytes([place]) for place in range(20)]
    known = {page_keys(hashes[place], 2)[kind]: 100 * kind + place for kind in (0, 1) for place in pages[kind]}

    match = match_window(known.get, lambda _: None, hashes, limit, num_matched, 2)

    end = longest(pages[0] & pages[1], set(), limit, num_matched)
    assert match.cached == [100 * kind + place for place in range(max(0, end - num_matched), end) for kind in (0, 1)]
    assert match.first == max(0, end - num_matched)


def test_nothing_cached_costs_few_lookups() -> None:
    """One for each window, not one for each block."""
    asked: list[bytes] = []
    hashes = [place.to_bytes(2) for place in range(1000)]
    assert match_window(asked.append, lambda _: None, hashes, 1000, 100).num_blocks == 0
    assert len(asked) == 10
