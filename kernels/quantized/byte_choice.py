"""Chooses launch shapes for weights of 8 bits, by tokens and sizes: as an H200's times say of those that were measured.

Of rows with one scale each, one token takes vectors, whose inputs are not rounded. More take tiles of 64 rows:

- where tokens may be rounded, both operands come from shared memory, and what counts is how much of the weight is on
  its way from memory: few tiles for each multiprocessor get many stages, many tiles few. Above 64 tokens, Hopper takes
  tiles of 128 tokens, of which each multiprocessor has one at most, where such are faster than the library. Of int8
  that is slow, because it stores its sums: up to 256 tokens take tiles;
- so they do where blocks of 128 columns have scales, and up to 256 tokens on Hopper: the library has no such product.
  Their steps are one block deep, and up to 64 tokens took 0.44 to 0.83 of the time of those that are converted;
- otherwise numbers are converted in registers. Up to 32 tokens, tiles are for two warps: too few for Hopper's own
  instructions, whose operands of 8 bits take more instructions to arrange. Such tiles have 32 rows where registers
  would not suffice for 64, or programs would be few. Many tokens take tiles of 128 by 128 on Hopper.

K is cut as far as programs are lacking, but not into parts of fewer than 1024 columns: sums have to be added up.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import HOPPER, Target
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import SPLIT_FORMS, Config, Product
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.coding import Kind

MOST_IN_TILES, LIKE_FLOAT8 = 64, 128
"""Rounded tokens that small tiles multiply on any GPU; and up to which int8 takes float8's tiles on Hopper."""
PROGRAMS, LEAST_PART = 2, 1024
"""For each multiprocessor, up to which K is cut; and columns of a part, at least."""
ALONE = {64: TileConfig(64, 128, 128, 6, 4, rounded=True), 128: TileConfig(128, 128, 128, 6, 8, rounded=True)}
"""Tiles of 128 tokens that fill a multiprocessor's shared memory, by their rows."""
STEP_US, SUMS_US = {64: 0.25, 128: 0.43}, 3.0
"""Of such a tile 128 columns, and of a part of K a million sums, with the norm that adds them up. So the choice was
2% slower than the fastest of all in the mean of 100 products on an H200, and at most 14%."""
MANY_ROWS = 128
"""For each multiprocessor, from which on one token's programs are as small as can be."""


def choose_of_bytes(product: Product, tokens: int, kind: Kind, target: Target, *, rounded: bool) -> Config | None:
    """The launch shape for ``tokens``, a bucket, which may be ``rounded``; None: the library."""
    if tokens == 1 and not kind.width:
        return _vectors(product, kind, target)
    if not rounded or tokens == 1:
        return _converted(product, tokens, kind, target)
    if kind.width:
        return _rounded_groups(product, tokens, kind, target)
    if tokens <= MOST_IN_TILES:
        return _rounded(product, tokens, target)
    if target.capability != HOPPER:
        return None
    alone = _alone(product, tokens, target)
    if kind.code == Code.E4M3:
        return alone
    return alone if alone is not None and tokens <= LIKE_FLOAT8 else _whole(product, target)


def _vectors(product: Product, kind: Kind, target: Target) -> VectorConfig:
    if kind.zeros:
        return VectorConfig(4, 1024, 4)
    if product.rows >= MANY_ROWS * target.num_multiprocessors:
        return VectorConfig(2, 512, 2)
    return VectorConfig(4, 1024, 4, 2) if product.form in SPLIT_FORMS else VectorConfig(8, 1024, 4)


def _rounded(product: Product, tokens: int, target: Target, *, grouped: bool = False) -> TileConfig:
    split, width = product.form in SPLIT_FORMS, next(each for each in (16, 32, 64, 128) if tokens <= each)
    config, programs = TileConfig(64, width, 128, 4, 4, rounded=True), PROGRAMS
    if target.capability >= HOPPER and not target.small_memory:
        few = config.tiles(product.rows) <= target.num_multiprocessors
        if width == 16:
            deep = not split and product.inputs % 256 == 0 and not grouped
            config = replace(config, depth=256) if deep else replace(config, stages=8)
        elif width <= 64:
            config = replace(config, stages=(8 if grouped else 10) if few else 4)
            programs = 1  # parts of many tokens take time to be added up
    return _cut(config, product, target, programs) if split else config


def _rounded_groups(product: Product, tokens: int, kind: Kind, target: Target) -> TileConfig:
    """Of blocks: more than 64 tokens are rounded on Hopper alone. Sums of blocks have registers of their own, so that
    tiles of 128 by 128 would spill."""
    if tokens <= MOST_IN_TILES:
        return _rounded(product, tokens, target, grouped=True)
    if target.capability != HOPPER:
        return _converted(product, tokens, kind, target)
    config = TileConfig(64, 128, 128, 4, 4, rounded=True)
    if product.form not in SPLIT_FORMS:
        return config
    return _cut(config, product, target, PROGRAMS if tokens <= config.tokens else 1)


def _alone(product: Product, tokens: int, target: Target) -> TileConfig | None:
    """Tiles of 128 tokens, one for each multiprocessor; None: too many, or the library is as fast.

    The tensor memory accelerator was slower where a tile lacks tokens: 40.5 µs, not 31.9, for 192."""
    if product.form == "gated":
        return None
    splits, found = (1, 2, 4) if product.form in SPLIT_FORMS else (1,), []
    for config in (replace(ALONE[rows], splits=parts) for rows in ALONE for parts in splits):
        programs = config.tiles(product.rows) * -(-tokens // config.tokens) * config.splits
        if config.fits(product.inputs) and programs <= target.num_multiprocessors:
            steps = product.inputs // config.splits / config.depth
            sums = config.splits * product.rows * tokens / 2**20
            found.append((STEP_US[config.rows] * steps + SUMS_US * sums, config))
    if not found:
        return None
    _, best = min(found, key=itemgetter(0))
    whole = best.rows > 64 and best.splits == 1 and tokens > best.tokens
    return None if whole else best


def _whole(product: Product, target: Target) -> TileConfig:
    """For up to 256 tokens in int8, tiles of 128 of them."""
    config = TileConfig(128, 128, 128, 4, 8, rounded=True)
    if product.form in SPLIT_FORMS:
        return _cut(config, product, target, 0.5)
    short = replace(config, rows=64, warps=4)
    return short if short.tiles(product.rows) <= target.num_multiprocessors else config


def _converted(product: Product, tokens: int, kind: Kind, target: Target) -> TileConfig:
    split, width, depth, small = product.form in SPLIT_FORMS, max(16, tokens), kind.depth, kind.small
    hopper, programs = target.capability == HOPPER, PROGRAMS * target.num_multiprocessors
    if width > 64:
        wide = TileConfig(128, 128, depth, 3, 8)
        return wide if hopper and not small else TileConfig(64, 64, depth, 2 if target.small_memory else 3, 4)
    if width == 64:
        config = TileConfig(64, 64, depth, 2 if target.small_memory else 3 if small else 4, 4)
    elif width == 32 and split and hopper and not small:
        config = TileConfig(64, 32, depth, 6, 4)
    else:
        short = small if width == 32 else not split and product.rows < 64 * programs
        config = TileConfig(32 if short else 64, width, depth, 4, 2)
    return _cut(config, product, target, PROGRAMS) if split else config


def _cut(config: TileConfig, product: Product, target: Target, programs: float) -> TileConfig:
    """With K in as many parts as give each multiprocessor up to ``programs``."""
    most = programs * target.num_multiprocessors
    for splits in (8, 4, 2):
        cut = replace(config, splits=splits)
        enough = product.inputs // splits >= LEAST_PART and cut.tiles(product.rows) * splits <= most
        if enough and cut.fits(product.inputs):
            return cut
    return config
