"""Products of one or a few tokens with a weight matrix, without tensor cores: a program reads some rows of the weights.

The first weights are on their way before the kernel waits for the one before it, and a tile or two of them stay ahead
in registers. With few rows a program has many neighbours on its multiprocessor, which together keep the memory busy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear_tile import add_bias, silu_mul_tile, split_gated, store_tile, tile_rows
from kernels.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.triton_import import next_power_of_2, tl, triton


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """Launch shape: ``rows`` of weights by ``depth`` of K at a time, ``ahead`` (1 or 2) tiles of weights in flight."""

    rows: int
    depth: int
    warps: int
    ahead: int = 1


@triton.jit(do_not_specialize=["num_tokens"])
def _vector_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [T, N], or [T, N / 2] if GATED
    stride_x,
    num_tokens,  # T
    num_rows,  # N
    size,  # K
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # T rounded up
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    row, _ = tile_rows(tile, num_rows, BLOCK_N, BLOCK_N, GATED)
    token, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    weights = weight_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    inputs = x_ptr + token[:, None] * stride_x + column[None, :]
    present = (token < num_tokens)[:, None]
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weights, mask=(column < size)[None, :], other=0.0)
    if AHEAD == 2:
        second = tl.load(weights + BLOCK_K, mask=(column + BLOCK_K < size)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M, BLOCK_K), tl.float32)
    for k in range(0, size, BLOCK_K):
        later = k + AHEAD * BLOCK_K
        if EVEN_K:
            fetched = tl.load(weights + later, mask=later < size, other=0.0)
            x = tl.load(inputs + k, mask=present, other=0.0)
        else:
            fetched = tl.load(weights + later, mask=(column + later < size)[None, :], other=0.0)
            x = tl.load(inputs + k, mask=present & (column + k < size)[None, :], other=0.0)
        acc += w.to(tl.float32)[:, None, :] * x.to(tl.float32)[None, :, :]
        if AHEAD == 2:
            w = second
            second = fetched
        else:
            w = fetched
    total = add_bias(tl.sum(acc, axis=2), bias_ptr, row)
    if GATED:
        gate, up = split_gated(total)
        total = silu_mul_tile(gate, up, out_ptr.dtype.element_ty)
    HALVES: tl.constexpr = 2 if GATED else 1
    store_tile(total, tile, out_ptr, token, num_tokens, num_rows // HALVES, BLOCK_N // HALVES)


def vector_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: VectorConfig,
    *,
    gated: bool,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], plus bias [N], into out [T, N]; ``gated``: silu(gate) * up into out [T, N / 2]."""
    (num_tokens, size), num_rows = x.shape, weight.shape[0]
    _vector_kernel[(-(-num_rows // config.rows),)](
        x,
        weight,
        bias,
        out,
        x.stride(0),
        num_tokens,
        num_rows,
        size,
        GATED=gated,
        EVEN_K=size % config.depth == 0,
        BLOCK_N=config.rows,
        BLOCK_M=next_power_of_2(num_tokens),
        BLOCK_K=config.depth,
        AHEAD=config.ahead,
        num_warps=config.warps,
        **pdl(x.device),
    )
    return out
