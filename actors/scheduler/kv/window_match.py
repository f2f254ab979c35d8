"""Finds the longest prefix of which at least the last window is cached: no query behind it sees more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Find = Callable[[bytes], int | None]


class Match(NamedTuple):
    """A prefix that ends with ``cached`` blocks on the device and, behind them, ``hosts`` in the host tier; the first
    of these is block ``first`` of the prefix."""

    first: int
    cached: list[int]
    hosts: list[int]

    @property
    def num_blocks(self) -> int:
        """Of the whole prefix."""
        return self.first + len(self.cached) + len(self.hosts)


def match_window(find: Find, find_host: Find, hashes: Sequence[bytes], limit: int, num_matched: int) -> Match:
    """The match with the most blocks, ``limit`` at most, of prefixes whose last ``num_matched`` blocks (or all) can be
    found. Takes at most about two lookups per block, and few where nothing is cached.

    Each block that is missing ends all matches behind it, so the next try ends there.
    """
    end = min(limit, len(hashes))
    while end > 0:
        first = max(0, end - num_matched)
        match = Match(first, [], [])
        for place in range(first, end):
            if not _extend(match, find, find_host, hashes[place]):
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
