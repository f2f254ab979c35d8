"""Launch shapes beyond those that the cost model ranks, for whoever can time them: tiles that fit a GPU's
multiprocessors, and more for one token.

The cost model knows only tiles that were compiled ahead. Where these are too few to keep every multiprocessor busy, or
a few too many, a tile of other height divides the rows evenly.
"""

from __future__ import annotations

from itertools import product
from math import ceil

from pagebus.kernels.common.target import HOPPER, Target
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import SPLIT_FORMS, DenseConfig, Product, is_legal
from pagebus.kernels.linear.skinny_gemm import TileConfig

VECTORS = (
    VectorConfig(2, 512, 2, 1), VectorConfig(4, 1024, 4, 1), VectorConfig(4, 2048, 8, 1), VectorConfig(2, 1024, 4, 2),
    VectorConfig(8, 512, 2, 1),
)  # fmt: skip
"""Of one token, beside the two that the cost model knows; all were the fastest somewhere on an H200."""
MOST_TOKENS = 64
"""Of more, products are bounded by more than reading weights."""
LEAST_ROWS, MOST_ROWS = 24, 112
DEPTHS = {8: ((128, 4), (256, 3)), 16: ((128, 4), (64, 8)), 32: ((128, 4), (64, 8)), 64: ((128, 4), (64, 6))}
"""Depths with stages, by the tokens of a tile."""


def fitted(one: Product, bucket: int, target: Target) -> list[DenseConfig]:
    """More launch shapes for a product of weights in 16 bits; whether a GPU takes them shows when they are launched."""
    if bucket > MOST_TOKENS:
        return []
    found: list[DenseConfig] = [*VECTORS] if bucket == 1 else []
    tokens = max(8, bucket)
    for rows, (depth, stages), splits in product(_rows(one, target), DEPTHS[tokens], _splits(one)):
        config = TileConfig(rows, tokens, depth, stages, 4, splits)
        tiles = config.tiles(one.rows) * splits
        if is_legal(one, bucket, config) and (splits == 1 or tiles <= 3 * target.num_multiprocessors):
            found.append(config)
    if one.form in SPLIT_FORMS and target.capability == HOPPER and bucket > 8:
        halves = (TileConfig(64, tokens, 64, 8, 4, splits, tma=True) for splits in (2, 4))
        found += [config for config in halves if is_legal(one, bucket, config)]
    return found


def _rows(one: Product, target: Target) -> list[int]:
    """Heights with which tiles, or twice or three times as many, are hardly fewer than the multiprocessors."""
    found = []
    for times in (1, 2, 3):
        rows = 2 * ceil(one.rows / target.num_multiprocessors / times / 2)
        if one.form == "gated":
            rows += rows % 4  # halves are even too
        if LEAST_ROWS <= rows <= MOST_ROWS:
            found.append(rows)
    return found


def _splits(one: Product) -> tuple[int, ...]:
    return (1, 2) if one.form in SPLIT_FORMS else (1,)
