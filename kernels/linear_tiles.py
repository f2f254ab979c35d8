"""Products of few tokens with a weight matrix on tensor cores: weights are the rows of the tiles, tokens the columns.

Reading the weights once, at the speed of the memory, is all that counts while tokens are few. So tiles are long in the
weights and as narrow as the tokens allow, and their rows are chosen so that every multiprocessor gets its share. Where
that is not enough, K is split over programs, whose float32 sums are left to the next kernel: it adds a few numbers for
each token faster than programs could wait for each other here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear_tile import add_bias, prefetch_rows, silu_mul_tile, split_gated, store_tile, tile_rows
from kernels.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.triton_import import TensorDescriptor, next_power_of_2, tl, triton

PREFETCHED_BYTES, PREFETCHED_TOKENS = 16 << 20, range(2, 65)
"""Weights of up to so many bytes are called into the L2 cache while the kernels before still run, for that many tokens:
the time of small products is mostly that of the way to the memory. Larger weights would push each other out."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch shape: ``rows`` (even) of weights by ``tokens``, ``depth`` of K at a time, K in ``splits`` parts.

    ``tma``: tiles come through the tensor memory accelerator (Hopper and later; ``rows`` is a power of two then).
    """

    rows: int
    tokens: int
    depth: int
    stages: int
    warps: int
    splits: int = 1
    tma: bool = False

    def fits(self, num_inputs: int) -> bool:
        """Whether K can be cut so."""
        return self.splits == 1 or num_inputs % (self.splits * self.depth) == 0


@triton.jit(do_not_specialize=["num_tokens"])
def _tiles_kernel(
    x_ptr,  # [T, K], or with TMA a descriptor of it
    weight_ptr,  # [N, K], or with TMA a descriptor of it
    prefetched_ptr,  # the weights themselves, [N, K], if PREFETCHED
    bias_ptr,  # [N] or None
    out_ptr,  # [T, N], or [T, N / 2] if GATED; several such sums [SPLITS, T, N] float32
    stride_x,
    num_tokens,  # T
    num_rows,  # N
    size,  # K
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,  # K is a multiple of SPLITS * BLOCK_K, if > 1
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,  # all rows of all tiles exist
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # ROWS rounded up
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PIECES: tl.constexpr,  # of a row that is prefetched, so that all threads take part
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(1), tl.program_id(2)
    row, exists = tile_rows(tile, num_rows, ROWS, BLOCK_N, GATED)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    part = size // SPLITS
    begin = split * part
    if not TMA:
        first = weight_ptr + row.to(tl.int64)[:, None] * size + begin
        inputs = x_ptr + token.to(tl.int64)[:, None] * stride_x + begin + column[None, :]
    if PDL:
        gdc_launch_dependents()
        if PREFETCHED:
            prefetch_rows(prefetched_ptr, row, size, begin, PREFETCHED, PIECES)
        gdc_wait()
    # Through TMA, gate and up are tiles of their own; otherwise, so that they may be small, two halves of one.
    PAIR: tl.constexpr = TMA and GATED
    acc = tl.zeros((BLOCK_N // 2 if PAIR else BLOCK_N, BLOCK_M), tl.float32)
    up = acc
    present, exists = (token < num_tokens)[:, None], exists[:, None]
    for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        if PAIR:
            x = x_ptr.load([tl.program_id(0) * BLOCK_M, k])
            acc = tl.dot(weight_ptr.load([tile * (BLOCK_N // 2), k]), tl.trans(x), acc)
            up = tl.dot(weight_ptr.load([num_rows // 2 + tile * (BLOCK_N // 2), k]), tl.trans(x), up)
        else:
            if TMA:
                x = x_ptr.load([tl.program_id(0) * BLOCK_M, begin + k])
                w = weight_ptr.load([tile * BLOCK_N, begin + k])
            elif EVEN_K:
                x = tl.load(inputs + k, mask=present, other=0.0)
                weights = first + column[None, :] + k
                w = tl.load(weights) if EVEN_N else tl.load(weights, mask=exists, other=0.0)
            else:
                inside = (column + k < part)[None, :]
                x = tl.load(inputs + k, mask=present & inside, other=0.0)
                w = tl.load(first + column[None, :] + k, mask=exists & inside, other=0.0)
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    if PAIR:
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        column = tl.where(column < num_rows // 2, column, 0)
        acc, up = add_bias(acc, bias_ptr, column), add_bias(up, bias_ptr, num_rows // 2 + column)
    else:
        acc = add_bias(acc, bias_ptr, row)
        if GATED:
            acc, up = split_gated(acc)
    if GATED:
        acc = silu_mul_tile(acc, up, out_ptr.dtype.element_ty)
    if SPLITS > 1:
        out_ptr += split * num_tokens.to(tl.int64) * num_rows
    HALVES: tl.constexpr = 2 if GATED else 1
    store_tile(acc, tile, out_ptr, token, num_tokens, num_rows // HALVES, ROWS // HALVES)


def tiles_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: TileConfig,
    *,
    gated: bool,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], plus bias [N], into out [T, N]; ``gated``: silu(gate) * up into out [T, N / 2].

    With several splits, which have no bias, out is float32 [splits, T, N] and gets sums that have yet to be added up.
    """
    (num_tokens, size), num_rows = x.shape, weight.shape[0]
    assert config.fits(size)
    if config.splits > 1:
        assert out.shape == (config.splits, num_tokens, num_rows)
        assert bias is None
        assert not gated
    block, sources = next_power_of_2(config.rows), (x, weight)
    if config.tma:
        assert block == config.rows
        sources = (
            TensorDescriptor.from_tensor(x, [config.tokens, config.depth]),
            TensorDescriptor.from_tensor(weight, [block // 2 if gated else block, config.depth]),
        )
    wanted = weight.nbytes <= PREFETCHED_BYTES and num_tokens in PREFETCHED_TOKENS
    prefetched = size // config.splits // 64 * 64 if wanted else 0
    grid = (-(-num_tokens // config.tokens), -(-num_rows // config.rows), config.splits)
    _tiles_kernel[grid](
        *sources,
        weight if prefetched else None,
        bias,
        out,
        x.stride(0),
        num_tokens,
        num_rows,
        size,
        GATED=gated,
        SPLITS=config.splits,
        EVEN_K=size % config.depth == 0,
        EVEN_N=config.rows == block and num_rows % block == 0,
        ROWS=config.rows,
        BLOCK_N=block,
        BLOCK_M=config.tokens,
        BLOCK_K=config.depth,
        STAGES=config.stages,
        TMA=config.tma,
        PREFETCHED=prefetched,
        PIECES=max(1, min(8, 32 * config.warps // block)),
        PRECISION="ieee",
        num_warps=config.warps,
        **pdl(x.device),
    )
    return out
