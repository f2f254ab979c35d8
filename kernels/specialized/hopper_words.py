"""Launches products with words of eight 4-bit codes on Hopper: some warps widen words for others
(`pagebus.kernels.specialized.hopper_widening`), or those that multiply do so
(`pagebus.kernels.specialized.hopper_direct`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.coded.weights import WORD_TILE, Code, Coded
from pagebus.kernels.common.pdl import pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl
from pagebus.kernels.specialized.hopper_direct import widening_direct_kernel
from pagebus.kernels.specialized.hopper_gemm import DEPTH, GROUPS
from pagebus.kernels.specialized.hopper_widening import widening_kernel

ROWS = 128
"""Of a tile: as many zeros have the 128 bytes that the tensor memory accelerator wants."""
AHEAD = 3
"""Steps for which words are on their way."""
SHARED_BYTES = 226 * 1024
LAUNCH_REGISTERS, LOADING_REGISTERS, MOST_REGISTERS = 128, 24, 168
"""Of a thread: with four times four warps at launch; of loading ones, and of widening ones at most."""
DIRECT_REGISTERS = 168, 240, 240
"""Of a thread at launch, with three times four warps, and of multiplying ones, which widen."""
DIRECT_AHEAD, MOST_STAGES = 4, 8


@dataclass(frozen=True, slots=True)
class WideningConfig:
    """Launch shape: tiles of ``rows`` by ``tokens``, K in ``splits`` parts. Some warps widen words for others (128 rows
    by 128 or 256 tokens), or each those that it multiplies (``direct``; 128 or 256 rows, 16 to 256 tokens, 256 of both
    are too many)."""

    tokens: int
    splits: int = 1
    direct: bool = False
    rows: int = ROWS

    def tiles(self, num_rows: int) -> int:
        """The number of tiles for so many rows of weights, and up to ``tokens`` tokens."""
        return -(-num_rows // self.rows)

    @property
    def stages(self) -> int:
        """As many as fit shared memory beside the words."""
        words = self.ahead * self.rows * (WORD_TILE // 2 + 4 * 4 + 2)
        row = 2 * DEPTH
        if self.direct:
            return min(MOST_STAGES, (SHARED_BYTES - words) // (row * self.tokens))
        return (SHARED_BYTES - words) // (row * (self.rows + self.tokens))

    @property
    def ahead(self) -> int:
        """Steps for which words are on their way."""
        return DIRECT_AHEAD if self.direct else AHEAD

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of each thread at launch, and of a multiplying and a widening one after the others have given theirs away.
        Beside accumulators a thread needs those of its tokens; the compiler needs some more than those of the largest
        instruction."""
        if self.direct:
            return DIRECT_REGISTERS
        multiplying = self.rows * self.tokens // 256 + 64
        widening = min(MOST_REGISTERS, 4 * LAUNCH_REGISTERS - LOADING_REGISTERS - 2 * multiplying)
        return LAUNCH_REGISTERS, multiplying, widening

    def fits(self, num_inputs: int) -> bool:
        """Whether K can be divided in this way."""
        return num_inputs % (self.splits * WORD_TILE) == 0


def reads_groups(width: int, *, zeros: bool) -> bool:
    """Whether the kernel reads groups of ``width`` columns: whole tiles, or 32 or 64 columns without zeros. For scales
    of fewer, registers and shared memory would not suffice."""
    return width % WORD_TILE == 0 or (width in (32, 64) and not zeros)


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
    assert weight.scale.is_contiguous()
    assert weight.zero is None or weight.zero.is_contiguous()
    token_tiles, row_tiles = -(-num_tokens // config.tokens), config.tiles(num_rows)
    num_tiles = token_tiles * row_tiles * config.splits
    part = config.rows // (2 if gated else 1)
    target = target_of(x.device)
    assert target is not None
    launch, multiplying, widening = config.registers
    more = {} if config.direct else {"GROUPS": GROUPS, "WIDENING_REGISTERS": widening}
    (widening_direct_kernel if config.direct else widening_kernel)[(min(num_tiles, target.num_multiprocessors),)](
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
        AHEAD=config.ahead,
        WIDTH=weight.width,
        ZEROS=weight.zero is not None,
        REGISTERS=multiplying,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=launch,
        **more,
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
