"""Finds the longest prefix of which at least the last window is cached: later queries see no more.

If only some layers have a window, all pages of the others must be there, and those of the last window of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagebus.actors.scheduler.kv.prefix_index import page_keys

Find = Callable[[bytes], int | None]


class Match(NamedTuple):
    """A prefix that ends with ``cached`` blocks on the device and, behind them, ``hosts`` in the host tier; the first
    of these is block ``first`` of the prefix."""

    first: int
    cached: list[int]
    hosts: list[int]

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prefix, if each is one page."""
        return self.first + len(self.cached) + len(self.hosts)

    def cut(self, num_blocks: int) -> Match:
        """The match shortened to this many blocks of the prefix, if each is one page."""
        count = max(0, num_blocks - self.first)
        return Match(self.first, self.cached[:count], self.hosts[: max(0, count - len(self.cached))])


def match_window(
    find: Find, find_host: Find, hashes: Sequence[bytes], limit: int, num_matched: int, windowed_pages: int = 0
) -> Match:
    """The match with the most blocks, ``limit`` at most, of prefixes whose last ``num_matched`` blocks (or all) can be
    found. Takes at most about two lookups per block, and few where nothing is cached.

    A missing block rules out all matches that contain it, so the next try ends there. With ``windowed_pages``, that
    many pages of each block are looked up, by their own keys.
    """
    end = min(limit, len(hashes))
    while end > 0:
        first = max(0, end - num_matched)
        match = Match(first, [], [])
        for place in range(first, end):
            keys = page_keys(hashes[place], windowed_pages) if windowed_pages else hashes[place : place + 1]
            if not all(_extend(match, find, find_host, key) for key in keys):
                end = place
                break
        else:
            return match
    return Match(0, [], [])


def _extend(match: Match, find: Find, find_host: Find, block_hash: bytes) -> bool:
    """Add the next block to a match, if it is found where one may follow."""
    block = None if match.hosts else find(block_hash)
    if block is not None:
        match.cached.append(block)
        return True
    host = find_host(block_hash)
    if host is not None:
        match.hosts.append(host)
    return host is not None
