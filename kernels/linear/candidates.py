"""The launch shapes that are considered for a product: few enough for the cost model to ask all of them.

Weights are the rows of tiles, tokens their columns. On Hopper, tiles of 64 rows and more take its own matrix
instructions; other GPUs may have smaller ones, which suits their many small multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from pagebus.kernels.common.target import HOPPER
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.library_parts import LibraryConfig
from pagebus.kernels.linear.shapes import SPLIT_FORMS, Config, DenseConfig, Product, is_legal
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.specialized.hopper_gemm import TOKENS, SpecializedConfig

MOST_OF_VECTORS = 2
"""Tokens that are multiplied without tensor cores, at most."""
MOST_OF_RESIDUALS = 32
"""Tokens of a product that does half of the next norm: of more, it was never faster."""
VECTORS = (VectorConfig(2, 1024, 4, 1), VectorConfig(2, 2048, 8, 1))
"""On an H200 the faster of the two was 5% slower than the fastest of 18 in the mean of 15 products, and at most 19%."""
HOPPER_ROWS, SPECIALIZED_ROWS = (48, 64, 112), (32, 48, 64, 96, 128, 192, 224, 256)
HOPPER_DEPTHS = {
    16: ((128, 4), (256, 3), (256, 4)),
    32: ((128, 4), (128, 6), (256, 3)),
    64: ((64, 5), (128, 3), (128, 4), (256, 3)),
    128: ((64, 4), (128, 3), (128, 4)),
}
"""Depths with stages, by the tokens of a tile."""
OTHER_ROWS = (32, 48, 64, 128)
OTHER_DEPTHS = {
    16: ((64, 4), (128, 3), (128, 4)),
    32: ((64, 4), (128, 3), (128, 4)),
    64: ((64, 3), (64, 4), (128, 3)),
    128: ((32, 4), (64, 3), (64, 4)),
}
SPLITS = (1, 2, 4, 8)
LIBRARY_SPLITS = (2, 3, 4)
"""Of products of the library: with more, adding up took longer than they gained at all sizes measured."""
FIRST_ROWS = (12672, 16896, 25344, 33792)
"""Of the first of two products: 132 multiprocessors times 96, 128, 192 and 256, heights of the library's tiles."""
PARTED_ROWS, FEWEST_PARTED = {96: (2560, 5120), 128: (2560, 5120), 192: (3584, 4096), 256: (2560, 5120)}, 8192
"""By buckets: below how many rows four parts of K were faster than two, and the most rows; the fewest inputs."""
GATED_ROWS, GATED_BUCKETS, FILLED = (224, 192, 128, 144), (96, 128), 0.85
"""Heights of specialized tiles for gates, the preferred one first; their buckets; the least share of rounds filled."""


@cache
def menu(form: str, bucket: int, capability: int) -> tuple[DenseConfig, ...]:
    """Launch shapes of one split for ``bucket`` tokens, whatever the weights; shared memory and registers may not
    suffice."""
    if form == "residual" and bucket > MOST_OF_RESIDUALS:
        return ()
    if bucket == 1:
        return VECTORS
    vectors = VECTORS if bucket <= MOST_OF_VECTORS else ()
    tiles = _hopper_tiles(form, bucket) if capability == HOPPER else _other_tiles(bucket)
    return (*vectors, *tiles, *_specialized(form, bucket, capability))


def splits_of(form: str, config: DenseConfig) -> tuple[int, ...]:
    """In how many parts K may be summed up: whose sums are not added up by anyone has one."""
    if form not in SPLIT_FORMS or isinstance(config, VectorConfig):
        return (1,)
    return SPLITS


def parts_tried(product: Product, bucket: int) -> list[Config]:
    """The library's products in parts that are timed. The cost model does not rank them."""
    parts = [*map(LibraryConfig, LIBRARY_SPLITS), *(LibraryConfig(first=rows) for rows in FIRST_ROWS)]
    return [config for config in parts if is_legal(product, bucket, config)]


def parts_by_rule(product: Product, bucket: int) -> LibraryConfig | None:
    """The parts that were faster than all else on an H200, at nearly all sizes like this one; None: at too few."""
    fewest, most = PARTED_ROWS.get(bucket, (0, 0))
    config = LibraryConfig(4 if product.rows < fewest else 2)
    often = product.rows <= most and 2 * product.rows <= product.inputs <= 8 * product.rows
    like = often and product.inputs >= FEWEST_PARTED
    return config if like and is_legal(product, bucket, config) else None


def gates_by_rule(product: Product, bucket: int, multiprocessors: int) -> SpecializedConfig | None:
    """The tiles that were faster than all else on an H200 at all sizes whose rounds they fill; None: they do not."""
    if product.form != "gated" or bucket not in GATED_BUCKETS:
        return None
    for config in map(SpecializedConfig, GATED_ROWS):
        tiles = -(-product.rows // config.rows)
        filled = tiles / (-(-tiles // multiprocessors) * multiprocessors)
        if filled >= FILLED and is_legal(product, bucket, config):
            return config
    return None


def _hopper_tiles(form: str, bucket: int) -> Iterator[TileConfig]:
    halves = 2 if form == "gated" else 1
    for tokens in _widths(bucket):
        for rows, (depth, stages) in product(HOPPER_ROWS, HOPPER_DEPTHS[tokens]):
            if form not in SPLIT_FORMS and tokens <= 64:
                yield TileConfig(rows, tokens, depth, stages, _warps(rows, tokens))
        for rows, (depth, stages) in product((64 * halves, 128 * halves), HOPPER_DEPTHS[tokens]):
            yield TileConfig(rows, tokens, depth, stages, _warps(rows, tokens), tma=True)


def _other_tiles(bucket: int) -> Iterator[TileConfig]:
    for tokens in _widths(bucket):
        for rows, (depth, stages) in product(OTHER_ROWS, OTHER_DEPTHS[tokens]):
            if rows >= 64 or tokens <= 64:
                yield TileConfig(rows, tokens, depth, stages, _warps(rows, tokens))


def _widths(bucket: int) -> tuple[int, ...]:
    """Tokens of a tile. Those of 8 were slower than those of 16 nearly everywhere, by up to 30%."""
    return (max(bucket, 16),) if bucket <= 64 else (64, 128)


def _warps(rows: int, tokens: int) -> int:
    return 8 if rows > 64 and tokens >= 64 else 4


def _specialized(form: str, bucket: int, capability: int) -> Iterator[SpecializedConfig]:
    if capability == HOPPER and bucket > TOKENS // 2 and form != "residual":
        yield from map(SpecializedConfig, SPECIALIZED_ROWS)
