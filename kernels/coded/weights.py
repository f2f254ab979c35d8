"""A quantized weight as kernels of products read it, and the kernels' arguments for it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import tl

WORD_TILE = 128
"""Columns of a tile of words, see `pagebus.kernels.quantized.words`."""


class Code(IntEnum):
    """What the numbers of a weight are; as constants of kernels."""

    DENSE = 0
    INT8 = 1
    E4M3 = 2
    WORDS = 3


INT8, E4M3, WORDS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""The same within kernels."""
PORTABLE, SINCE_80, SINCE_89 = 0, 1, 2
"""By which instructions numbers are converted: Triton's own (the interpreter's only way), or those of GPUs since these
compute capabilities."""


class Coded(NamedTuple):
    """w = (number - zero) * scale, for ``numbers`` [N, K] in int8 or as the bits of float8_e4m3fn in uint8, or int32
    words [N, ceil(K / 128) * 16] of unsigned codes.

    Scale and zero of row n and column k are at ``n // height * row_stride + k // width * group_stride``; ``width`` 0:
    one scale for all columns. ``scale`` is float32, or uint8 exponents of two. Without ``zero``, that of words is 8.
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

    @property
    def rows(self) -> int:
        """N"""
        return self.numbers.shape[0]


DENSE: dict[str, Any] = {
    "scale_ptr": None, "zero_ptr": None, "stride_scale": None, "stride_group": None, "CODE": 0, "HEIGHT": 1,
    "WIDTH": 0, "NATIVE": PORTABLE,
}  # fmt: skip
"""Arguments of kernels for a weight that is not quantized."""


def coded_arguments(weight: Coded | torch.Tensor) -> dict[str, Any]:
    """Arguments of kernels that say what the numbers mean."""
    if not isinstance(weight, Coded):
        return DENSE
    return {
        "scale_ptr": weight.scale, "zero_ptr": weight.zero, "stride_scale": weight.row_stride,
        "stride_group": weight.group_stride, "CODE": int(weight.code), "HEIGHT": weight.height, "WIDTH": weight.width,
        "NATIVE": instructions_for(weight.numbers.device),
    }  # fmt: skip


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
