"""The launch shapes that are considered for products of quantized weights: few enough to compile and to time all.

They are the neighbours of what the rules choose (`byte_choice`, `word_choice`), whose comments say why such tiles are
fast. Registers depend on the layout: the table of what launch shapes need has those that are downloaded most, compiled
ahead for Hopper by ``python -m tests.kernels.quantized.compile_shapes``, which needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.resources import Resources, table_text, take_resources
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import pack, parse
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.coding import Kind
from pagebus.kernels.quantized.word_choice import few_tile

FOLDER = Path(__file__).with_name("resources")
VECTORS = (VectorConfig(2, 512, 2), VectorConfig(4, 1024, 4), VectorConfig(4, 1024, 4, 2), VectorConfig(8, 1024, 4))
ROUNDED = {
    16: ((64, 128, 6, 4), (64, 128, 8, 4), (64, 256, 4, 4)),
    32: ((64, 128, 4, 4), (64, 128, 10, 4), (64, 256, 4, 4)),
    64: ((64, 128, 4, 4), (64, 128, 8, 4), (64, 128, 10, 4)),
    128: ((64, 128, 4, 4), (64, 128, 6, 4), (128, 128, 4, 8), (128, 128, 6, 8)),
}
CONVERTED = {
    16: ((32, 4, 2), (64, 4, 2)),
    32: ((32, 4, 2), (64, 4, 2), (64, 6, 4)),
    64: ((64, 3, 4), (64, 4, 4)),
    128: ((128, 3, 8),),
}
WORDS = {32: ((64, 4, 4), (128, 4, 8)), 64: ((64, 3, 4), (128, 3, 8)), 128: ((128, 3, 8),)}
"""Rows, stages and warps (of those that are rounded, the depth comes second), by the tokens of a tile."""
DEPTHS = (256, 512, 1024)
"""Of few tokens of words: a tile of 128 columns for each warp."""


@cache
def menu(bucket: int, kind: Kind) -> tuple[TileConfig | VectorConfig, ...]:
    """Launch shapes of one split for ``bucket`` tokens; shared memory and registers may not suffice."""
    if kind.code.in_words:
        return tuple(_of_words(bucket, kind))
    if bucket == 1 and not kind.width and not kind.zeros:
        return VECTORS
    return tuple(_rounded(bucket, kind) if kind.rounded and bucket > 1 else _converted(bucket, kind))


def _widths(bucket: int) -> tuple[int, ...]:
    return (next(width for width in (16, 32, 64) if bucket <= width),) if bucket <= 64 else (64, 128)


def _rounded(bucket: int, kind: Kind) -> Iterator[TileConfig]:
    for tokens in _widths(bucket):
        for rows, depth, stages, warps in ROUNDED[tokens]:
            if not kind.width or (kind.width % depth == 0 and stages <= 8 and rows * tokens < 128 * 128):
                yield TileConfig(rows, tokens, depth, stages, warps, rounded=True)


def _converted(bucket: int, kind: Kind) -> Iterator[TileConfig]:
    for tokens in _widths(bucket):
        for rows, stages, warps in CONVERTED[tokens]:
            yield TileConfig(rows, tokens, kind.depth, stages, warps)


def _of_words(bucket: int, kind: Kind) -> Iterator[TileConfig]:
    few = (8 if bucket <= 8 else 16,) if bucket <= 16 else (bucket // 2,) if bucket <= 64 else ()
    if kind.code <= Code.E2M1 and not kind.lows:
        for tokens in few:
            for depth in DEPTHS if bucket <= 16 else DEPTHS[1:2]:
                for rows in (16, 32) if bucket <= 16 else (32,):
                    yield few_tile(rows, tokens, depth)
    for tokens in _widths(bucket) if bucket > 16 else ():
        for rows, stages, warps in WORDS[tokens]:
            yield TileConfig(rows, tokens, 128, stages, warps)


class CodedVariant(NamedTuple):
    """A kernel as compiled: for a layout (`Kind.name`), gated or not, of a launch shape with one split."""

    layout: str
    gated: bool
    config: TileConfig | VectorConfig


@cache
def resources(capability: int) -> dict[CodedVariant, Resources]:
    """What is known of the kernels for GPUs of exactly this capability."""
    path = FOLDER / f"sm_{capability}.json"
    return dict(map(_parse, json.loads(path.read_text())["variants"])) if path.is_file() else {}


def table(capability: int, triton: str, found: dict[CodedVariant, Resources]) -> str:
    """The text of a table, a line for each variant."""
    return table_text(capability, triton, (_packed(variant, found[variant]) for variant in sorted(found, key=repr)))


def _packed(variant: CodedVariant, needs: Resources) -> dict[str, Any]:
    return {"layout": variant.layout, "gated": variant.gated, **pack(variant.config), **needs._asdict()}


def _parse(stored: dict[str, Any]) -> tuple[CodedVariant, Resources]:
    fields = dict(stored)
    needs = take_resources(fields)
    layout, gated = fields.pop("layout"), fields.pop("gated")
    config = parse(fields)
    assert isinstance(config, TileConfig | VectorConfig)
    return CodedVariant(layout, gated, config), needs
