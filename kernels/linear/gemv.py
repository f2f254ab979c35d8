"""Products of one or a few tokens with a weight matrix, without tensor cores: each program reads some rows of the
weights.

The first weights are loaded before the kernel waits for the previous one, and one or two tiles stay prefetched in
registers. With few rows per program, many programs share a multiprocessor and together keep the memory busy. For one
token each thread reads 8 inputs: with 256 inputs of depth per warp, weights and inputs have the same layout, and the
loop exchanges nothing between threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.coded.quads import quads, quads_vector
from pagebus.kernels.coded.vectors import coded_vector, vector_numbers
from pagebus.kernels.coded.weights import Coded, coded_arguments, numbers_of, shape_of
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.layers.norm import Addition, HalfNorm
from pagebus.kernels.linear.epilogue import (
    add_bias,
    gated_tile,
    inverse_rms,
    load_squares,
    split_gated,
    store_residual,
    store_tile,
    tile_modules,
    tile_places,
    tile_rows,
)
from pagebus.kernels.lora.expand import Expansion, expanded, expansion_arguments


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """Launch shape: ``rows`` of weights by ``depth`` of K at a time, ``ahead`` (1 or 2) tiles of weights in flight."""

    rows: int
    depth: int
    warps: int
    ahead: int = 1

    def tiles(self, num_rows: int) -> int:
        """The number of tiles for so many rows of weights."""
        return -(-num_rows // self.rows)


@triton.jit(do_not_specialize=["num_tokens"])
def _vector_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [T, N], or [T, N / 2] if GATED
    squares_ptr,  # None, or [PARTS, T]: x is divided by its root mean square
    residual_ptr,  # None, or [T, N]: the product is added to it, and out is the sum times norm
    norm_ptr,  # [N]
    new_squares_ptr,  # [tiles, T]: sums of squares of the residual
    stride_x,
    num_tokens,  # T
    num_rows,  # N
    size,  # K
    eps,
    scale_ptr,  # of quantized weights, as `Coded` has them; else None
    zero_ptr,
    stride_scale,
    stride_group,
    s_ptr,  # None, or what adapters add: see `Expansion`
    of_token_ptr,
    memory_ptr,
    pages_ptr,
    places_ptr,
    second_row,
    third_row,
    CODE: tl.constexpr,  # 0: weights are as x; others are for one token only
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
    S_PARTS: tl.constexpr,  # of adapters, as the following
    SUMS: tl.constexpr,  # S_PARTS rounded up
    LARGEST: tl.constexpr,
    MODULES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    GATED: tl.constexpr,  # 0, or the number of an activation
    PARTS: tl.constexpr,  # of the norm's sums of squares
    BLOCK_PARTS: tl.constexpr,  # PARTS rounded up
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # T rounded up
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    QUADS: tl.constexpr,  # weights are read four columns at a time
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    row, _ = tile_rows(tile, num_rows, BLOCK_N, BLOCK_N, GATED)
    token, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    weights = weight_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    present = (token < num_tokens)[:, None]
    if PDL:
        gdc_launch_dependents()
    if QUADS:
        numbers = quads(weight_ptr, row, 0, size, EVEN_K, BLOCK_K)
    elif CODE:
        numbers = vector_numbers(weight_ptr, row, 0, size, CODE, EVEN_K, BLOCK_K)
    else:
        w = tl.load(weights, mask=(column < size)[None, :], other=0.0)
    if AHEAD == 2 and not CODE:
        second = tl.load(weights + BLOCK_K, mask=(column + BLOCK_K < size)[None, :], other=0.0)
    if residual_ptr is not None:
        norm = tl.load(norm_ptr + row)
    if PDL:
        gdc_wait()
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, token, num_tokens, PARTS, BLOCK_PARTS)
    if residual_ptr is not None:
        places, mask = tile_places(tile, token, num_tokens, num_rows, BLOCK_N, BLOCK_N)
        residual = tl.load(residual_ptr + places, mask=mask, other=0.0)
    if QUADS:
        total = quads_vector(
            numbers, x_ptr, weight_ptr, scale_ptr, row, size, CODE, EVEN_K, BLOCK_K, AHEAD, NATIVE
        )  # fmt: skip
    elif CODE:
        total = coded_vector(
            numbers, x_ptr, weight_ptr, scale_ptr, zero_ptr, stride_scale, stride_group, row, size, CODE, HEIGHT, WIDTH,
            EVEN_K, BLOCK_K, NATIVE,
        )  # fmt: skip
    else:
        if BLOCK_M == 1:
            inputs = x_ptr + column[None, :]
            acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        else:
            inputs = x_ptr + token[:, None] * stride_x + column[None, :]
            acc = tl.zeros((BLOCK_N, BLOCK_M, BLOCK_K), tl.float32)
        for k in range(0, size, BLOCK_K):
            later = k + AHEAD * BLOCK_K
            if EVEN_K:
                fetched = tl.load(weights + later, mask=later < size, other=0.0)
                x = tl.load(inputs + k, mask=present, other=0.0)
            else:
                fetched = tl.load(weights + later, mask=(column + later < size)[None, :], other=0.0)
                x = tl.load(inputs + k, mask=present & (column + k < size)[None, :], other=0.0)
            if BLOCK_M == 1:
                acc += w.to(tl.float32) * x.to(tl.float32)
            else:
                acc += w.to(tl.float32)[:, None, :] * x.to(tl.float32)[None, :, :]
            if AHEAD == 2:
                w = second
                second = fetched
            else:
                w = fetched
        total = tl.sum(acc, axis=1)[:, None] if BLOCK_M == 1 else tl.sum(acc, axis=2)
    if s_ptr is not None:
        total += expanded(
            row, token, num_tokens, s_ptr, of_token_ptr, memory_ptr, pages_ptr, places_ptr, second_row, third_row,
            *tile_modules(tile, num_rows, second_row, third_row, BLOCK_N, GATED), S_PARTS, SUMS, LARGEST, MODULES,
            PAGES, PAGE, FIELDS,
        )  # fmt: skip
    if squares_ptr is not None:
        total *= inverse_rms(squares, size, eps)[None, :]
    total = add_bias(total, bias_ptr, row)
    if GATED:
        gate, up = split_gated(total)
        total = gated_tile(gate, up, out_ptr.dtype.element_ty, GATED)
    HALVES: tl.constexpr = 2 if GATED else 1
    if residual_ptr is None:
        store_tile(total, tile, out_ptr, token, num_tokens, num_rows // HALVES, BLOCK_N // HALVES)
    else:
        store_residual(
            total, residual, norm, tile, residual_ptr, out_ptr, new_squares_ptr, token, num_tokens, num_rows, BLOCK_N
        )  # fmt: skip


def _in_quads(x: torch.Tensor, weight: torch.Tensor | Coded) -> bool:
    """Whether these are rows of 8 bits that can be read as words, and inputs four at a time."""
    if not isinstance(weight, Coded) or weight.code.in_words or weight.width or weight.zero is not None:
        return False
    return weight.inputs % 4 == 0 and x.itemsize == 2 and x.data_ptr() % 8 == 0


def vector_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Coded,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: VectorConfig,
    *,
    gated: int,
    before: HalfNorm | None = None,
    after: Addition | None = None,
    expansion: Expansion | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], plus bias [N], into out [T, N]; ``gated``: act(gate) * up, the activation
    of this number in `GATES`, into out [T, N / 2]. Quantized weights are for one token.

    ``before``: x is that of this norm. ``after``: the product is added to this residual, and out is the sum times the
    norm's weight. ``expansion``: what adapters add to the product.
    """
    (num_tokens, size), (num_rows, _) = x.shape, shape_of(weight)
    assert after is None or not gated
    assert not isinstance(weight, Coded) or (num_tokens == 1 and weight.plain)
    parts = 1 if before is None else len(before.squares)
    _vector_kernel[(config.tiles(num_rows),)](
        x,
        numbers_of(weight),
        bias,
        out,
        None if before is None else before.squares,
        *((None,) * 3 if after is None else after[:3]),
        x.stride(0),
        num_tokens,
        num_rows,
        size,
        0.0 if before is None else before.eps,
        **coded_arguments(weight),
        **expansion_arguments(expansion),
        GATED=gated,
        PARTS=parts,
        BLOCK_PARTS=next_power_of_2(parts),
        EVEN_K=size % config.depth == 0,
        BLOCK_N=config.rows,
        BLOCK_M=next_power_of_2(num_tokens),
        BLOCK_K=config.depth,
        AHEAD=config.ahead,
        QUADS=_in_quads(x, weight),
        num_warps=config.warps,
        **pdl(x.device),
    )
    return out
