"""Which layers of a model share a page of the key-value cache.

Where some layers have a sliding window and others read everything, keys and values of a block of tokens lie in several
pages of equal size, each of as many layers as read everything. One page is of these; the others, of layers with
windows, are given back once the window has passed them. All pages come from one pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MOST_UNUSED = 0.25
"""Room in the pages of layers with windows that may be unused, as a share of all layers: sequences that are shorter
than the window pay for it."""
MOST_PAGES = 16
"""Pages of a block: each is an entry of the scheduler's and of the device's tables."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """A block of tokens takes ``1 + windowed_pages`` pages of ``page_layers`` layers each. ``layers``: of each layer,
    which of these it lies in, 0 or the windowed ones from 1 on, and its place there. ``windowed_tokens``: how many
    tokens, the newest included, a layer of the windowed pages may still read."""

    page_layers: int
    layers: tuple[tuple[int, int], ...]
    windowed_pages: int = 0
    windowed_tokens: int = 0


@lru_cache(maxsize=64)
def cache_groups(reaches: tuple[int, ...]) -> CacheGroups:
    """Of layers that see ``reaches`` (:attr:`pagebus.actors.model.spec.Gqa.reach`): windowed pages where they pay."""
    count, full = len(reaches), sum(not reach for reach in reaches)
    one = CacheGroups(count, tuple((0, place) for place in range(count)))
    windowed = count - full
    if not full or not windowed:
        return one
    pages = -(-windowed // full)
    if pages * full - windowed > MOST_UNUSED * count or pages >= MOST_PAGES:
        return one
    layers, seen = [], [0, 0]
    for reach in reaches:
        page, place = divmod(seen[bool(reach)], full)
        layers.append((page + bool(reach), place))
        seen[bool(reach)] += 1
    return CacheGroups(full, tuple(layers), pages, max(map(abs, reaches)))
