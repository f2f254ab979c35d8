"""Which of the library's tiles should multiply fastest: by the rounds that they take.

A product is computed in rounds: a tile for each multiprocessor, then the next ones. Each round takes as long as one
tile, however few tiles the last one has. The library proposes its tiles in an order that does not always heed that: it
prefers few large ones to more of a size that fills the rounds.

Rates are those of an H200 for 96 to 256 tokens (``python -m tests.kernels.cublas.fit_rates``). Of 1,024 tokens and more
power bounds products, and whole steps gained nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """``rows`` of weights by ``tokens``; ``rate``: TFLOP/s of an H200 whose multiprocessors are all busy with it."""

    rows: int
    tokens: int
    rate: int


TILES = {
    18: Tile(128, 64, 565), 20: Tile(128, 128, 673), 21: Tile(256, 64, 609), 24: Tile(256, 128, 695),
    28: Tile(96, 128, 666), 29: Tile(128, 160, 680), 30: Tile(160, 128, 695), 31: Tile(192, 128, 682),
    32: Tile(128, 192, 655), 33: Tile(128, 96, 621), 116: Tile(64, 192, 581), 135: Tile(80, 128, 622),
    165: Tile(112, 128, 672), 184: Tile(144, 128, 687), 197: Tile(168, 128, 688), 201: Tile(176, 128, 697),
    208: Tile(192, 64, 598), 209: Tile(192, 192, 657), 247: Tile(320, 64, 594), 248: Tile(320, 128, 642),
    333: Tile(64, 224, 584), 400: Tile(128, 80, 619), 414: Tile(128, 224, 685), 456: Tile(192, 80, 668),
    458: Tile(192, 96, 670), 465: Tile(192, 160, 677), 493: Tile(256, 80, 675), 495: Tile(256, 96, 654),
}  # fmt: skip
"""By their numbers in cuBLASLt."""
SLOW = {25, 263, 272}
"""Large tiles of few tokens, which the library proposes first for some sizes. Any other was faster."""
MADE = 30
"""The library never proposes it, though it fills one round with two parts of K of 5,120 rows and 256 tokens."""
MEMORY_TB_PER_S = 4.0
"""At which weights of 16 bits are read."""
LEAST_GAIN = 0.95
"""The first proposal is taken unless another should take at most this share of its time."""
LEAST_ROUNDS = 1.5
"""Of tiles of 128 by 128: of smaller products that are not cut, rounds do not decide."""
MOST_TOKENS = 256


def rounds_decide(num_rows: int, num_tokens: int, parts: int, multiprocessors: int) -> bool:
    """Whether a product, or one of which K has several ``parts``, has few enough tokens and is large enough."""
    large = parts > 1 or num_rows * num_tokens >= LEAST_ROUNDS * 128 * 128 * multiprocessors
    return num_tokens <= MOST_TOKENS and large


def rounds(tile: Tile, num_rows: int, num_tokens: int, parts: int, multiprocessors: int) -> int:
    """How many a product has."""
    tiles = parts * -(-num_rows // tile.rows) * -(-num_tokens // tile.tokens)
    return -(-tiles // multiprocessors)


def fastest(proposed: Sequence[int], num_rows: int, num_tokens: int, parts: int, multiprocessors: int) -> int | None:
    """The index in ``proposed``, numbers of tiles, of the one that should be fastest; None: it is not known."""

    def picoseconds(index: int) -> float:
        """For each of the product's inputs."""
        tile = TILES[proposed[index]]
        taken = rounds(tile, num_rows, num_tokens, parts, multiprocessors) * multiprocessors
        return max(2 * taken * tile.rows * tile.tokens / parts / tile.rate, 2 * num_rows / MEMORY_TB_PER_S)

    known = [index for index, number in enumerate(proposed) if number in TILES]
    if not known or (0 not in known and proposed[0] not in SLOW):
        return None
    best = min(known, key=picoseconds)
    return 0 if 0 in known and picoseconds(best) > LEAST_GAIN * picoseconds(0) else best
