"""Launches products with words of eight 4-bit codes on Hopper: `pagebus.kernels.specialized.hopper_widening`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.coded.weights import WORD_TILE, Code, Coded
from pagebus.kernels.common.pdl import pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl
from pagebus.kernels.specialized.hopper_gemm import DEPTH
from pagebus.kernels.specialized.hopper_widening import widening_kernel

ROWS = 128
"""Of a tile, at least: as many zeros have the 128 bytes that the tensor memory accelerator wants."""
ALIGNED = 16
"""Bytes, and zeros, of which the tensor memory accelerator wants multiples."""
MOST_STAGES = 8
"""Steps of 128 columns for which words and tokens are on their way, at most."""
MOST_OF_TWO = 64
"""Tokens of tiles of which a multiprocessor has room for two programs, at most."""
SHARED_BYTES = 226 * 1024
REGISTERS, LOADING_REGISTERS = ((168, 240), (80, 104)), 24
"""Of a thread at launch, with three times four warps, and of a multiplying one, by programs of a multiprocessor; and of
loading ones."""


@dataclass(frozen=True, slots=True)
class WideningConfig:
    """Launch shape: tiles of ``rows`` (128 or 256) by ``tokens`` (16 to 256; 128 with 256 rows), K in ``splits``
    parts."""

    tokens: int
    splits: int = 1
    rows: int = ROWS

    def tiles(self, num_rows: int) -> int:
        """The number of tiles for this many rows of weights, and up to ``tokens`` tokens."""
        return -(-num_rows // self.rows)

    @property
    def programs(self) -> int:
        """Of a multiprocessor: two where their registers suffice, because each waits much."""
        return 2 if self.rows == ROWS and self.tokens <= MOST_OF_TWO else 1

    @property
    def stages(self) -> int:
        """As many as fit shared memory: 128 columns of tokens, and of words with scales of four groups and zeros."""
        stage = 2 * WORD_TILE * self.tokens + self.rows * (WORD_TILE // 2 + 4 * 4 + 2)
        return min(MOST_STAGES, SHARED_BYTES // self.programs // stage)

    def fits(self, num_inputs: int) -> bool:
        """Whether K can be divided in this way."""
        return num_inputs % (self.splits * WORD_TILE) == 0


def reads_groups(width: int, *, zeros: bool) -> bool:
    """Whether the kernel reads groups of ``width`` columns: whole tiles, or 32 or 64 columns without zeros. For scales
    of fewer, registers and shared memory would not suffice."""
    return width % WORD_TILE == 0 or (width in (32, 64) and not zeros)


def reads_rows(rows: int, *, zeros: bool, gated: bool) -> bool:
    """Whether it reads this many rows: the tensor memory accelerator fails for zeros that begin between multiples of 16
    bytes, as those of a group or of the gates behind others may."""
    return not zeros or rows % (2 * ALIGNED if gated else ALIGNED) == 0


def reads_words(weight: Coded) -> bool:
    """Whether the kernel reads a weight like this."""
    plain = weight.code == Code.WORDS and weight.low is None and weight.whole is None
    rows = weight.row_stride == 1 and weight.height == 1
    return plain and rows and reads_groups(weight.width, zeros=weight.zero is not None)


def widened_linear(
    x: torch.Tensor,
    weight: Coded,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: WideningConfig,
    *,
    gated: int,
) -> torch.Tensor:
    """As `pagebus.kernels.specialized.hopper_gemm.specialized_linear`, of a weight that `reads_words`."""
    (num_tokens, size), num_rows = x.shape, weight.rows
    assert config.fits(size)
    assert reads_words(weight)
    assert reads_rows(num_rows, zeros=weight.zero is not None, gated=gated > 0)
    assert weight.scale.is_contiguous()
    assert weight.zero is None or weight.zero.is_contiguous()
    token_tiles, row_tiles = -(-num_tokens // config.tokens), config.tiles(num_rows)
    num_tiles = token_tiles * row_tiles * config.splits
    part = config.rows // (2 if gated else 1)
    target = target_of(x.device)
    assert target is not None
    launch, multiplying = REGISTERS[config.programs - 1]
    widening_kernel[(min(num_tiles, config.programs * target.num_multiprocessors),)](
        LayoutDescriptor.from_tensor(x, [config.tokens, DEPTH], _shared(128, 16)),
        LayoutDescriptor.from_tensor(weight.numbers, [part, 16], _shared(64, 32)),
        _in_a_row(weight.scale, part),
        _in_a_row(weight.scale, part) if weight.zero is None else _in_a_row(weight.zero, config.rows),
        out if bias is None else bias,
        out,
        num_tiles,
        token_tiles,
        row_tiles,
        num_tokens,
        num_rows,
        size // config.splits,
        weight.group_stride,
        GATED=gated,
        BIASED=bias is not None,
        SPLITS=config.splits,
        ROWS=config.rows,
        STAGES=config.stages,
        WIDTH=weight.width,
        ZEROS=weight.zero is not None,
        REGISTERS=multiplying,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=launch,
        **pdl(x.device),
    )
    return out


def _shared(swizzled_bytes: int, bits: int) -> object:
    """A layout of rows in shared memory, in an order that spreads them over its banks."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzled_bytes, element_bitwidth=bits, rank=2)


def _in_a_row(values: torch.Tensor, count: int) -> object:
    """A descriptor by which ``count`` of all values come at a time."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * values.itemsize, rank=1)
    return LayoutDescriptor.from_tensor(values.flatten(), [count], layout)
