"""Launches products of a few tokens with words of eight 4-bit codes on Hopper:
`pagebus.kernels.specialized.hopper_ring`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.coded.weights import WORD_TILE, Code, Coded
from pagebus.kernels.common.pdl import pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl, next_power_of_2
from pagebus.kernels.layers.norm import Addition, HalfNorm
from pagebus.kernels.specialized.hopper_ring import ring_kernel

ROWS, MOST_TOKENS, WARPS = 16, 16, 8
"""Of a tile of words, of all, and of a program, a tile of columns for each."""
MOST_INPUTS, MOST_HELD = 64, 16
"""Steps times tokens whose inputs registers have room for, and tiles whose sums they hold from pass to pass."""
SHARED_BYTES, MOST_STAGES = 216 * 1024, 12
REGISTERS, LOADING_REGISTERS = 168, 24
"""Of a thread at launch, with three times four warps, and of a loading one."""


@dataclass(frozen=True, slots=True)
class FewConfig:
    """Launch shape for up to ``tokens`` (8 or 16): K in ``passes`` of ``steps`` of eight tiles of 128 columns."""

    tokens: int
    steps: int
    passes: int = 1

    def tiles(self, num_rows: int) -> int:
        """The number of tiles for this many rows of weights."""
        return num_rows // ROWS

    def fits(self, num_inputs: int) -> bool:
        """Whether registers have room for a pass, and each has columns."""
        part = self.steps * WARPS * WORD_TILE
        held = self.tokens in (8, MOST_TOKENS) and 0 < self.steps * self.tokens <= MOST_INPUTS
        return held and num_inputs % 32 == 0 and (self.passes - 1) * part < num_inputs <= self.passes * part


def reads_few(weight: Coded) -> bool:
    """Whether the kernel reads a weight like this."""
    exact = weight.code == Code.WORDS and weight.low is None and weight.whole is None
    groups = weight.width == WORD_TILE and weight.row_stride == 1 and weight.height == 1
    return exact and groups and weight.scale.dtype == torch.float32


def few_linear(
    x: torch.Tensor,
    weight: Coded,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: FewConfig,
    *,
    gated: int,
    before: HalfNorm | None = None,
    after: Addition | None = None,
) -> torch.Tensor:
    """As `pagebus.kernels.linear.skinny_gemm.tiles_linear`, of a weight that `reads_few`, whose rows are a multiple of
    16, or of 32 if ``gated``."""
    (num_tokens, size), num_rows = x.shape, weight.rows
    num_columns = num_rows // 2 if gated else num_rows
    num_tiles, target = num_columns // ROWS, target_of(x.device)
    assert config.fits(size)
    assert reads_few(weight)
    assert num_columns % ROWS == 0
    assert num_tokens <= config.tokens
    assert target is not None
    held = -(-num_tiles // target.num_multiprocessors)
    assert config.passes == 1 or held * (2 if gated else 1) <= MOST_HELD
    stage = config.steps * WARPS * ROWS * (64 + 4 + (weight.zero is not None))
    parts = 1 if before is None else len(before.squares)
    residual, norm, squares = (out, out, out) if after is None else after[:3]
    scale = _of_groups(weight.scale)
    ring_kernel[(min(num_tiles, target.num_multiprocessors),)](
        x, by_tiles(weight.numbers), scale, scale if weight.zero is None else _of_groups(weight.zero),
        out if bias is None else bias, out, out if before is None else before.squares, residual, norm, squares,
        num_tiles, num_columns, x.stride(0), num_tokens, size, 0.0 if before is None else before.eps,
        TOKENS=config.tokens, STEPS=config.steps, PASSES=config.passes, HELD=held if config.passes > 1 else 0,
        STAGES=min(MOST_STAGES, SHARED_BYTES // stage), GATED=gated, BIASED=bias is not None,
        ZEROS=weight.zero is not None, NORMED=before is not None, ADDED=after is not None, PARTS=parts,
        BLOCK_PARTS=next_power_of_2(parts), EVEN_K=size == config.steps * config.passes * WARPS * WORD_TILE,
        LOADING_REGISTERS=LOADING_REGISTERS, num_warps=WARPS, maxnreg=REGISTERS, **pdl(x.device),
    )  # fmt: skip
    return out


def by_tiles(words: torch.Tensor) -> object:
    """A descriptor of words [K / 128, N, 16]."""
    tiles = words.unflatten(1, (-1, 16)).transpose(0, 1)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=3)
    return LayoutDescriptor.from_tensor(tiles, [WARPS, ROWS, 16], layout)


def _of_groups(values: torch.Tensor) -> object:
    """A descriptor of scales, or zeros, [K / 128, N]."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * values.itemsize, rank=2)
    return LayoutDescriptor.from_tensor(values, [WARPS, ROWS], layout)
