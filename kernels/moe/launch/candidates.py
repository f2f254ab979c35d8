"""The launch shapes of experts that are considered: few enough for the cost model to ask all of them.

Each of both products has a menu for each kernel and width of items. Those that were fastest anywhere on an H200 are
there, those of the rule, and what is between; GPUs with less shared memory have shallower stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from pagebus.kernels.common.target import HOPPER
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.moe.launch.shapes import (
    LONG_ITEM,
    SHORT_ITEM,
    Config,
    ExpertsKernel,
    GroupConfig,
    PairConfig,
    ProductConfig,
    Shape,
    items_of,
    kernel_of,
)
from pagebus.kernels.specialized.hopper_gemm import TOKENS, SpecializedConfig

MOST_PAIRS = 64
"""Pairs that may be left unsorted, at most: twice as many as the rule leaves."""
ITEMS = (16, 32, 64, LONG_ITEM)
GATE_UP_PAIRS = (
    PairConfig(2, 256, 2), PairConfig(2, 512, 2), PairConfig(4, 256, 4), PairConfig(4, 512, 4),
    PairConfig(8, 512, 4, 3), PairConfig(16, 256, 4, 3),
)  # fmt: skip
DOWN_PAIRS = (
    *(PairConfig(4, depth, 8, 4) for depth in (1024, 512, 256, 128, 64)), PairConfig(8, 1024, 8, 3),
    PairConfig(4, 1024, 8), PairConfig(8, 256, 4, 4), PairConfig(32, 256, 4),
)  # fmt: skip
DEPTHS, LONG_DEPTHS, SMALL_DEPTHS = ((64, 3), (64, 4), (128, 3)), ((64, 3), (64, 4)), ((32, 4), (64, 3))
"""Depths of K with stages; those of the longest items on Hopper, and on other GPUs."""
HOPPER_ROWS, OTHER_ROWS = (64, 128), (32, 64, 128)
SPECIALIZED_ROWS = (128, 256)


class Way(NamedTuple):
    """How pairs are multiplied: by which kernel, in items of so many."""

    kernel: ExpertsKernel
    items: int


def ways(num_tokens: int, shape: Shape, capability: int) -> Iterator[Way]:
    """All that can compute so many tokens. Items far longer than an expert's pairs would be empty for the most part,
    far shorter ones would read weights too often."""
    pairs = num_tokens * shape.top_k
    if pairs <= MOST_PAIRS or num_tokens == 1:
        yield Way(ExpertsKernel.PAIRS, 1)
    mean = pairs / shape.experts
    least, most = min(LONG_ITEM, mean / 8), max(SHORT_ITEM, 8 * mean)
    yield from (Way(ExpertsKernel.GROUPED, items) for items in ITEMS if least <= items <= most)
    if capability == HOPPER and shape.is_whole and mean >= TOKENS / 4:
        yield Way(ExpertsKernel.SPECIALIZED, TOKENS)


def menu(way: Way, shape: Shape, capability: int, *, gated: bool) -> tuple[ProductConfig, ...]:
    """Launch shapes of the first product (``gated``) or the second; registers and shared memory may not suffice."""
    if way.kernel is ExpertsKernel.PAIRS:
        deepest = next_power_of_2(shape.hidden if gated else shape.width)
        return tuple(each for each in (GATE_UP_PAIRS if gated else DOWN_PAIRS) if each.depth <= deepest)
    if way.kernel is ExpertsKernel.SPECIALIZED:
        return tuple(map(SpecializedConfig, SPECIALIZED_ROWS))
    return _tiles(way.items, capability, gated, capability == HOPPER and shape.is_aligned)


@cache
def _tiles(items: int, capability: int, gated: bool, tma: bool) -> tuple[GroupConfig, ...]:
    return tuple(
        GroupConfig(rows, depth, stages, warps, tma)
        for rows in (HOPPER_ROWS if capability == HOPPER else OTHER_ROWS)
        for depth, stages in _depths(items, capability)
        for warps in (4, 8)
        if _is_balanced((2 if gated else 1) * rows * items, warps)
    )


def _depths(items: int, capability: int) -> tuple[tuple[int, int], ...]:
    if items < LONG_ITEM:
        return DEPTHS
    return LONG_DEPTHS if capability == HOPPER else SMALL_DEPTHS


def _is_balanced(sums: int, warps: int) -> bool:
    """Whether threads have neither hardly any sums of a tile, nor more than registers hold."""
    return (16 if warps == 8 else 0) <= sums // (32 * warps) <= 128


def is_known(shape: Shape, config: Config, capability: int) -> bool:
    """Whether this GPU's menus for such experts have these launch shapes."""
    way = Way(kernel_of(config), items_of(config))
    if way not in _every_way(shape, capability):
        return False
    return all(
        one in menu(way, shape, capability, gated=gated)
        for one, gated in ((config.gate_up, True), (config.down, False))
    )


def _every_way(shape: Shape, capability: int) -> Iterator[Way]:
    """Whatever the number of tokens."""
    yield Way(ExpertsKernel.PAIRS, 1)
    yield from (Way(ExpertsKernel.GROUPED, items) for items in ITEMS)
    if capability == HOPPER and shape.is_whole:
        yield Way(ExpertsKernel.SPECIALIZED, TOKENS)


def every_product(capability: int) -> Iterator[tuple[Way, ProductConfig, bool]]:
    """All that menus have for GPUs of this capability, whatever the experts: way, launch shape, and whether ``gated``.
    Those that `is_aligned` tells apart differ in ``tma``."""
    whole, odd = Shape(8, 2, 4096, 4096), Shape(8, 2, 4100, 4100)
    for shape, gated in product((whole, odd), (True, False)):
        for way in _every_way(shape, capability):
            yield from ((way, config, gated) for config in menu(way, shape, capability, gated=gated))
