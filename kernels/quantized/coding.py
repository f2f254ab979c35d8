"""Layouts as kernels of products read them, and what such kernels are chosen by."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.kernels.coded.weights import Code, Coded
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows
from pagebus.kernels.quantized.words import TILE

SMALL_GROUPS = (16, 32, 64)
"""Columns of groups that are parts of a tile of words."""
LEAST_WIDTH = 32
"""Columns of blocks of 8 bits, at least: a tile of tokens and weights has as many."""


class Kind(NamedTuple):
    """What launch shapes depend on besides sizes. ``rounded``: activations may be rounded to the same format."""

    code: Code
    height: int = 1
    width: int = 0
    zeros: bool = False
    rounded: bool = False

    @property
    def name(self) -> str:
        """``fp8``, ``fp8-128x128``, ``int4-1x128-zeros``."""
        number = {Code.INT8: "int8", Code.E4M3: "fp8", Code.WORDS: "int4"}[self.code]
        block = f"-{self.height}x{self.width}" if self.width else ""
        return f"{number}{block}{'-zeros' if self.zeros else ''}"


def coded_of(layout: Layout) -> Coded | None:
    """A layout [N, K] for kernels, sharing memory; None: none reads it."""
    if isinstance(layout, W8Rows):
        return Coded(*_bytes(layout.values), layout.shape[-1], layout.scale)
    if layout.low is not None:
        return None
    return _words(layout) if isinstance(layout, W4Words) else _blocks(layout)


def kind_of(layout: Layout) -> Kind | None:
    """Of a layout [N, K]; None: no kernel reads it."""
    coded = coded_of(layout)
    if coded is None:
        return None
    rounded = isinstance(layout, W8Rows) and layout.rounded
    return Kind(coded.code, coded.height, coded.width, coded.zero is not None, rounded)


def _bytes(values: torch.Tensor) -> tuple[torch.Tensor, Code]:
    return (values, Code.INT8) if values.dtype == torch.int8 else (values.view(torch.uint8), Code.E4M3)


def _blocks(layout: W8Blocks) -> Coded | None:
    (height, width), columns = layout.block, layout.shape[-1]
    width = 0 if width >= columns else width
    if width and (width < LEAST_WIDTH or width & (width - 1)):
        return None
    numbers, code = _bytes(layout.values)
    return Coded(numbers, code, columns, layout.scale, layout.scale.shape[-1], 1, height, width, layout.zero)


def _words(layout: W4Words) -> Coded | None:
    if layout.table is not None or layout.whole is not None:
        return None
    width = 0 if layout.group >= layout.columns else layout.group
    if width % TILE and width not in SMALL_GROUPS:
        return None
    rows = layout.shape[-2]
    return Coded(layout.words, Code.WORDS, layout.columns, layout.scale, 1, rows, 1, width, layout.zero)
