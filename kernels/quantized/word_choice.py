"""Launch shapes of products with words of eight 4-bit codes, from what an H200 took for the products of Llama-8B.

- Up to 16 tokens, what counts is that many words are on their way. Hopper's kernel whose words come through a ring took
  0.6 to 0.8 of the time of all others, as long as its registers have room for the inputs. If they have not, the one
  token of a step is read in several passes.
- Other such tiles have deep steps. A step takes 512 columns, a tile of 128 for each of
  four warps, so that K is cut within a program. Tiles have 16 rows. They have 32 where those alone give four programs
  for each multiprocessor, and in products that do half of a norm, of which each tile leaves a sum. Where tiles of 16
  give fewer than that, and K cannot be cut further, a step takes 1,024 columns. Programs have four steps at least.
- With 17 to 64 tokens, tiles of 128 rows with K in parts were within 4% of the fastest, where they are enough for the
  GPU. Where they are not, narrow tiles with deep steps were twice as fast, though words are read for each of them.
- More take Hopper's kernel whose warps widen the words that they multiply, if there are programs for a quarter of the
  multiprocessors; and up to 64, if there are for three quarters. A step of 128 columns took 0.85 microseconds with
  tiles of 128 rows by 128 tokens, and 1.38 with twice as many tokens. Where nothing adds up parts of K, a kernel of its
  own may.
- 257 to 1,024 tokens take it if waves of such steps should end before the library would: that one takes 0.68
  microseconds for a million numbers that are dequantized first, and multiplies at 800 TFLOP/s.
- Otherwise, more take tiles of 128 by 128, if they are enough, or else of 128 by 64. Above 128 tokens those would wait
  for the matrix instructions, and leave multiprocessors idle: there the library multiplies by dequantized rows.
- Registers do not suffice for that where a tile has several scales, nor on other GPUs: tiles have 64 by 64 there.

Weights with offsets (`lows`) have no deep steps.
"""

from __future__ import annotations

from dataclasses import replace

from pagebus.kernels.coded.weights import WORD_TILE, Code
from pagebus.kernels.common.target import HOPPER, Target
from pagebus.kernels.linear.shapes import BUCKETS, SPLIT_FORMS, Product
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.coding import DEPTH, Kind
from pagebus.kernels.specialized.hopper_few import MOST_HELD, MOST_INPUTS, MOST_TOKENS, ROWS, WARPS, FewConfig
from pagebus.kernels.specialized.hopper_words import WideningConfig, reads_groups, reads_rows

FEWEST = 0.25
"""Of multiprocessors, that have a program of the widening kernel."""
FEW, MOST_OF_A_TILE, MOST_OF_OURS = 16, 64, 128
"""Tokens of deep steps, of one tile, and up to which the library is never asked; at most."""
SCARCE, ROOM = 4, 8
"""Programs of few tokens for each multiprocessor: fewer are too few, and more are not made by cutting K."""
STEPS, LEAST_PART, PARTS = 4, 1024, (8, 4, 2)
"""Of a program over its part of K, at least; columns of such a part, at least; how many there may be."""
DEEP, DEEPEST = 512, 1024
WIDENING_US = {
    WideningConfig(256): 1.38, WideningConfig(128, rows=256): 1.7,
    WideningConfig(128): 0.85, WideningConfig(64): 1.25,
}  # fmt: skip
BEGIN_US, SPLIT_US = 3.0, 0.002
"""Of a step of 128 columns by a tile, or by two where a multiprocessor has two programs; before and behind all of them;
and for the sum of a part of K of each token of a tile."""
ADD_US, ADD_BYTES_PER_US = 3.5, 1.7e6
"""Of a kernel that only adds up parts of K: to begin, and for what it reads."""
DEQUANTIZED_PER_US, LIBRARY_FLOPS_PER_US, LIBRARY_BEGIN_US = 1e6 / 0.68, 8e8, 2.0
"""What the library takes for many tokens: numbers that are dequantized, operations of its product, and what is left."""


def few_config(product: Product, tokens: int, kind: Kind, target: Target) -> FewConfig | None:
    """The launch shape of the kernel whose words come through a ring; None: it does not compute the product, or another
    is faster."""
    halves = 2 if product.form == "gated" else 1
    reads = kind.code == Code.WORDS and not kind.lows and kind.width == WORD_TILE
    sizes = product.inputs % WORD_TILE == 0 and product.rows % (ROWS * halves) == 0
    if target.capability != HOPPER or tokens > MOST_TOKENS or not reads or not sizes:
        return None
    width = 8 if tokens <= 8 else 16
    steps = -(-product.inputs // (WARPS * WORD_TILE))
    passes = -(-steps * width // MOST_INPUTS)
    held = -(-product.rows // (ROWS * target.num_multiprocessors))
    if passes > 1 and (tokens > 1 or held > MOST_HELD):
        return None
    return FewConfig(width, -(-steps // passes), passes)


def widening_config(product: Product, tokens: int, kind: Kind, target: Target) -> WideningConfig | None:
    """The launch shape of the kernel whose warps widen the words that they multiply; None: another is faster."""
    fitting = widening_configs(product, tokens, kind, target)
    if not fitting:
        return None
    best = min(fitting, key=lambda config: widening_us(config, product, tokens, target))
    if tokens > BUCKETS[-1]:
        return best if widening_us(best, product, tokens, target) < _library_us(product, tokens) else None
    least = 0.75 if tokens == MOST_OF_A_TILE else FEWEST
    whole = _widening_programs(replace(best, splits=1), product, tokens)
    if product.form not in SPLIT_FORMS and whole < FEWEST * target.num_multiprocessors:
        return None
    return best if _widening_programs(best, product, tokens) >= least * target.num_multiprocessors else None


def widening_configs(product: Product, tokens: int, kind: Kind, target: Target) -> list[WideningConfig]:
    """All of that kernel's launch shapes for this many tokens; none if it does not compute the product."""
    if tokens < MOST_OF_A_TILE or target.capability != HOPPER or product.form == "residual":
        return []
    if not _widens(kind) or not reads_rows(product.rows, zeros=kind.zeros, gated=product.form == "gated"):
        return []
    splits = (1, *reversed(PARTS)) if product.form in (*SPLIT_FORMS, "plain") else (1,)
    most = 256 if tokens > MOST_OF_OURS else 128
    configs = [replace(config, splits=parts) for config in WIDENING_US if config.tokens <= most for parts in splits]
    small = (config for config in configs if config.splits <= 4 * config.programs)
    return [config for config in small if config.fits(product.inputs)]


def _widens(kind: Kind) -> bool:
    return kind.code == Code.WORDS and not kind.lows and reads_groups(kind.width, zeros=kind.zeros)


def _widening_programs(config: WideningConfig, product: Product, tokens: int) -> int:
    return config.tiles(product.rows) * -(-tokens // config.tokens) * config.splits


def widening_us(config: WideningConfig, product: Product, tokens: int, target: Target) -> float:
    """What it takes, in microseconds."""
    waves = -(-_widening_programs(config, product, tokens) // (config.programs * target.num_multiprocessors))
    steps = product.inputs // config.splits // WORD_TILE
    us = BEGIN_US + SPLIT_US * config.tokens * config.splits + waves * steps * WIDENING_US[replace(config, splits=1)]
    if config.splits > 1 and product.form not in SPLIT_FORMS:
        us += ADD_US + 4 * config.splits * tokens * product.rows / ADD_BYTES_PER_US
    return us


def _library_us(product: Product, tokens: int) -> float:
    numbers = product.rows * product.inputs
    return LIBRARY_BEGIN_US + numbers / DEQUANTIZED_PER_US + 2 * numbers * tokens / LIBRARY_FLOPS_PER_US


def word_config(product: Product, tokens: int, kind: Kind, target: Target) -> TileConfig:
    """The launch shape of tiles for ``tokens``, which are a bucket."""
    if tokens <= FEW:
        return _few(product, max(8, tokens), kind, target)
    wide = _wide(product, tokens, kind, target)
    if tokens > MOST_OF_A_TILE or kind.lows or (target.small_memory and tokens == MOST_OF_A_TILE):
        return wide
    spills = kind.small and target.capability != HOPPER and tokens < MOST_OF_A_TILE
    if _fills(wide, product, tokens, target) and not spills:
        return wide
    return few_tile(32, tokens // 2, deep_of(product.inputs, DEEP))


def library_is_faster(product: Product, tokens: int, kind: Kind, target: Target) -> bool:
    """Whether the library multiplies this many tokens by dequantized rows in less time."""
    if tokens <= MOST_OF_OURS or target.capability != HOPPER or kind.small or product.form in SPLIT_FORMS:
        return False
    return not _fills(_largest(128), product, tokens, target)


def deep_of(columns: int, most: int) -> int:
    """Columns of a step, a power of two: ``most``, or fewer so that there are enough steps."""
    depth = most
    while depth > DEPTH and depth * STEPS > columns:
        depth //= 2
    return depth


def few_tile(rows: int, tokens: int, depth: int) -> TileConfig:
    """With a warp for each tile of 128 columns, and two for one tile."""
    return TileConfig(rows, tokens, depth, 3 if depth >= DEEP else 4, max(2, depth // DEPTH))


def _few(product: Product, width: int, kind: Kind, target: Target) -> TileConfig:
    enough, most = SCARCE * target.num_multiprocessors, ROOM * target.num_multiprocessors
    rows = 32 if product.form == "residual" or product.rows >= 32 * enough else 16
    if kind.lows:
        return _cut(few_tile(2 * rows, width, DEPTH), product, width, most)
    cut = (_cut(few_tile(rows, width, depth), product, width, most) for depth in (DEEP, DEEP // 2))
    scarce = width == 8 and product.rows < 16 * enough
    whole = few_tile(rows, width, deep_of(product.inputs, DEEPEST if scarce else DEEP))
    return next((config for config in cut if config.splits > 1), whole)


def _wide(product: Product, tokens: int, kind: Kind, target: Target) -> TileConfig:
    """Of more tokens than a few."""
    if kind.lows or target.capability != HOPPER or (kind.small and tokens > MOST_OF_A_TILE):
        config = _modest(min(MOST_OF_A_TILE, tokens), target)
        return _cut(config, product, tokens, 4 * target.num_multiprocessors)
    for width in (128, 64) if tokens > MOST_OF_A_TILE else (tokens,):
        # Sums of 128 by 128 leave registers for one such program.
        most = (1 if width == 128 else 2) * target.num_multiprocessors
        config = _cut(_largest(width), product, tokens, most)
        if _fills(config, product, tokens, target):
            break
    return config


def _largest(width: int) -> TileConfig:
    return TileConfig(128, width, DEPTH, 4 if width == 32 else 3, 8)


def _modest(width: int, target: Target) -> TileConfig:
    """That needs few registers."""
    if width == 32:
        return TileConfig(32, width, DEPTH, 4, 2)
    return TileConfig(64, width, DEPTH, 2 if target.small_memory else 3, 4)


def _programs(config: TileConfig, product: Product, tokens: int) -> int:
    return config.tiles(product.rows) * -(-tokens // config.tokens) * config.splits


def _fills(config: TileConfig, product: Product, tokens: int, target: Target) -> bool:
    """Whether most multiprocessors have a program."""
    return 4 * _programs(config, product, tokens) >= 3 * target.num_multiprocessors


def _cut(config: TileConfig, product: Product, tokens: int, most: int) -> TileConfig:
    """With K in as many parts as ``most`` programs allow."""
    if product.form in SPLIT_FORMS:
        for splits in PARTS:
            cut = replace(config, splits=splits)
            long = product.inputs // splits >= max(LEAST_PART, STEPS * config.depth)
            if long and cut.fits(product.inputs) and _programs(cut, product, tokens) <= most:
                return cut
    return config
