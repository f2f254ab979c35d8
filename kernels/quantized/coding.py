"""Layouts as kernels of products read them, and what such kernels are chosen by."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.kernels.coded.weights import Code, Coded
from pagebus.kernels.linear.shapes import ROUNDED
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows

SLICE = 16
"""Columns of groups of words are multiples of this; and the narrowest groups of 8 bits."""
DEPTH, LEAST_DEPTH = 128, 32
"""Columns of tiles: tensor cores want 32 numbers of 8 bits, which have two scales at most."""


NAMES = {Code.INT8: "int8", Code.E4M3: "fp8", Code.WORDS: "int4", Code.E2M1: "fp4", Code.TABLE: "table4"}


class Kind(NamedTuple):
    """What launch shapes depend on besides sizes. ``rounded``: activations may be rounded to the same format. ``lows``:
    something is subtracted from each group."""

    code: Code
    height: int = 1
    width: int = 0
    zeros: bool = False
    rounded: bool = False
    lows: bool = False

    @classmethod
    def parse(cls, name: str) -> Kind:
        """What :attr:`name` gave.

        Raises:
            ValueError: it gave something else.
        """
        first, *others = name.split("-")
        block = next((each.split("x") for each in others if "x" in each), ("1", "0"))
        code = next((code for code, known in NAMES.items() if known == first), None)
        kind = None if code is None else cls(
            code, int(block[0]), int(block[1]), "zeros" in others, ROUNDED[1:] in others, "lows" in others
        )  # fmt: skip
        if kind is None or kind.name != name:
            raise ValueError(f"{name} is no layout of quantized weights")
        return kind

    @property
    def name(self) -> str:
        """``fp8-rounded``, ``fp8-128x128``, ``int4-1x128-zeros``."""
        block = f"-{self.height}x{self.width}" if self.width else ""
        parts = ((self.zeros, "-zeros"), (self.lows, "-lows"), (self.rounded, ROUNDED))
        return NAMES[self.code] + block + "".join(name for there, name in parts if there)

    @property
    def small(self) -> bool:
        """Whether a tile has several scales, and needs registers for these."""
        return self.lows or self.width % DEPTH > 0

    @property
    def depth(self) -> int:
        """Columns of a tile: of words, of one scale, or of two."""
        if self.code.in_words or not self.width:
            return DEPTH
        return next((depth for depth in (DEPTH, 64) if self.width % depth == 0), LEAST_DEPTH)


def coded_of(layout: Layout) -> Coded | None:
    """A layout [N, K], or [E, N, K], for kernels, sharing memory; None: none reads it."""
    if isinstance(layout, W8Rows):
        return Coded(*_bytes(layout.values), layout.shape[-1], layout.scale)
    return _words(layout) if isinstance(layout, W4Words) else _blocks(layout)


def kind_of(layout: Layout) -> Kind | None:
    """Of a layout [N, K] or [E, N, K]; None: no kernel reads it."""
    coded = coded_of(layout)
    if coded is None:
        return None
    rounded = not isinstance(layout, W4Words) and layout.rounded and coded.rounds
    return Kind(coded.code, coded.height, coded.width, coded.zero is not None, rounded, coded.low is not None)


def experts_kind_of(layout: Layout) -> Kind | None:
    """`kind_of` experts [E, N, K]; None also where each has its columns in an order of its own."""
    if not isinstance(layout, W8Rows) and layout.order is not None:
        return None
    return kind_of(layout)


def _bytes(values: torch.Tensor) -> tuple[torch.Tensor, Code]:
    return (values, Code.INT8) if values.dtype == torch.int8 else (values.view(torch.uint8), Code.E4M3)


def _blocks(layout: W8Blocks) -> Coded | None:
    (height, width), columns = layout.block, layout.shape[-1]
    width = 0 if width >= columns and layout.low is None else width
    if width and width < LEAST_DEPTH and width != SLICE:
        return None
    numbers, code = _bytes(layout.values)
    across = layout.scale.shape[-1]
    return Coded(numbers, code, columns, layout.scale, across, 1, height, width, layout.zero, layout.low)


def _words(layout: W4Words) -> Coded | None:
    width = 0 if layout.group >= layout.columns and layout.low is None else layout.group
    if width % SLICE or (layout.low is not None and layout.whole is not None):
        return None
    code = Code.WORDS if layout.table is None else Code.E2M1 if layout.e2m1 else Code.TABLE
    scale = layout.scale.view(torch.int8) if layout.scale.dtype == torch.float8_e4m3fn else layout.scale
    return Coded(
        layout.words, code, layout.columns, scale, 1, layout.shape[-2], 1, width, layout.zero, layout.low,
        layout.whole, layout.table if code is Code.TABLE else None,
    )  # fmt: skip
