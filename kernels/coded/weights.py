"""A quantized weight as kernels of products read it, and the kernels' arguments for it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from pagebus.kernels.coded.rounding import GROUP, RoundedTokens, round_tokens
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import constant

WORD_TILE = 128
"""Columns of a tile of words, see `pagebus.kernels.quantized.words`."""


class Code(IntEnum):
    """What the numbers of a weight are; as constants of kernels."""

    DENSE = 0
    INT8 = 1
    E4M3 = 2
    WORDS = 3
    E2M1 = 4
    TABLE = 5

    @property
    def in_words(self) -> bool:
        """Whether they are codes of 4 bits in words."""
        return self >= Code.WORDS


INT8, E4M3, WORDS, E2M1, TABLE = (constant(int(code)) for code in list(Code)[1:])
"""The same within kernels: from WORDS on they are words."""
PORTABLE, SINCE_80, SINCE_89 = 0, 1, 2
"""By which instructions numbers are converted: Triton's own (the interpreter's only way), or those of GPUs since these
compute capabilities."""


class Coded(NamedTuple):
    """w = (number - zero) * scale - low, for ``numbers`` [N, K] in int8 or as the bits of float8_e4m3fn in uint8, or
    int32 words [N, ceil(K / 128) * 16] of codes: unsigned numbers, floats (E2M1), or places in ``table`` [16] float32.

    Scale, zero and low of row n and column k are at ``n // height * row_stride + k // width * group_stride``; ``width``
    0: one scale for all columns. ``scale`` is float32, or uint8 exponents of two, or the bits of float8_e4m3fn in int8
    beside ``whole`` [N] float32, which multiplies too. Without ``zero``, that of unsigned numbers is 8.

    Of a layer's experts all but ``table`` have a first dimension E more, and are contiguous.
    """

    numbers: torch.Tensor
    code: Code
    inputs: int
    scale: torch.Tensor
    row_stride: int = 1
    group_stride: int = 0
    height: int = 1
    width: int = 0
    zero: torch.Tensor | None = None
    low: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """N"""
        return self.numbers.shape[-2]

    @property
    def rounds(self) -> bool:
        """Whether kernels multiply it by tokens of the same 8 bits."""
        exact = self.zero is None and self.low is None
        return self.code in (Code.INT8, Code.E4M3) and self.width in (0, GROUP) and exact

    @property
    def plain(self) -> bool:
        """Whether kernels without tensor cores read it."""
        parts = self.code == Code.WORDS and self.width and WORD_TILE % self.width == 0
        others = self.low is not None or self.whole is not None or self.table is not None
        return self.code <= Code.WORDS and not others and bool(parts or self.width % WORD_TILE == 0)


DENSE: dict[str, Any] = {
    "scale_ptr": None, "zero_ptr": None, "stride_scale": None, "stride_group": None, "CODE": 0, "HEIGHT": 1,
    "WIDTH": 0, "NATIVE": PORTABLE,
}  # fmt: skip
"""Arguments of kernels for a weight that is not quantized."""
DENSE_TILES = DENSE | {"low_ptr": None, "whole_ptr": None, "table_ptr": None}
"""The same of kernels of tiles."""


def coded_arguments(weight: Coded | torch.Tensor) -> dict[str, Any]:
    """Arguments of kernels that say what the numbers mean."""
    if not isinstance(weight, Coded):
        return DENSE
    return {
        "scale_ptr": weight.scale, "zero_ptr": weight.zero, "stride_scale": weight.row_stride,
        "stride_group": weight.group_stride, "CODE": int(weight.code), "HEIGHT": weight.height, "WIDTH": weight.width,
        "NATIVE": instructions_for(weight.numbers.device),
    }  # fmt: skip


def tile_arguments(weight: Coded | torch.Tensor) -> dict[str, Any]:
    """The same of kernels of tiles, which read every kind."""
    if not isinstance(weight, Coded):
        return DENSE_TILES
    others = {"low_ptr": weight.low, "whole_ptr": weight.whole, "table_ptr": weight.table}
    return coded_arguments(weight) | others


def rounded_numbers(weight: Coded) -> tuple[torch.Tensor, dict[str, Any]]:
    """Numbers of 8 bits as what tensor cores multiply by tokens of the same format: [N, K] int8 or float8_e4m3fn, and
    the arguments of kernels of tiles."""
    assert weight.rounds
    numbers = weight.numbers if weight.code == Code.INT8 else weight.numbers.view(torch.float8_e4m3fn)
    return numbers, tile_arguments(weight) | {"CODE": int(Code.DENSE), "NATIVE": PORTABLE}


def tile_operands(
    x: torch.Tensor | RoundedTokens, weight: Coded | torch.Tensor, *, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """What kernels of tiles multiply: tokens, which may be ``rounded`` already if they are to be, and numbers of the
    weight; the scales of rounded tokens; and what the numbers mean."""
    if not rounded:
        assert isinstance(x, torch.Tensor)
        return x, numbers_of(weight), None, tile_arguments(weight)
    assert isinstance(weight, Coded)
    numbers, meaning = rounded_numbers(weight)
    if isinstance(x, RoundedTokens):
        assert not weight.width
        x, scales, _ = x
    else:
        x, scales = round_tokens(x, numbers.dtype, grouped=weight.width > 0)
    return x, numbers, scales, meaning


def instructions_for(device: torch.device) -> int:
    """By which instructions kernels for ``device`` convert."""
    target = target_of(device)
    if target is None:
        return PORTABLE
    return SINCE_89 if target.capability >= 89 else SINCE_80


def numbers_of(weight: Coded | torch.Tensor) -> torch.Tensor:
    """What is read from memory."""
    return weight.numbers if isinstance(weight, Coded) else weight


def shape_of(weight: Coded | torch.Tensor) -> tuple[int, int]:
    """[N, K]"""
    return (weight.rows, weight.inputs) if isinstance(weight, Coded) else (weight.shape[0], weight.shape[1])
