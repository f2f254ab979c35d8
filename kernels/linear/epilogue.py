"""Parts shared by the kernels for few tokens: the weight rows of a tile, and the epilogue of its sums."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.linear.activation import activate
from pagebus.kernels.lora.expand import module_of

WHOLLY_PREFETCHED, PARTLY_PREFETCHED, PREFETCHED_BYTES, PREFETCHED_TOKENS = 16 << 20, 64 << 20, 6 << 20, 64
"""Weights of up to so many bytes are called into the L2 cache while the kernels before still run, for up to that many
tokens: the time of small products is mostly that of the way to the memory. Of larger ones, up to the second size, so
many bytes are, where each row begins; still larger ones would only take bandwidth from the kernels before."""


@triton.jit
def tile_rows(tile, num_rows, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The rows of W [BLOCK_N] in ``tile``, and which exist: the first ROWS, as far as there are any.

    ``GATED``: half of the tile is from the first half of W, half from the second (gate | up), for act(gate) * up.
    """
    place = tl.arange(0, BLOCK_N)
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = BLOCK_N // HALVES
    within = place % WIDTH
    row = tile * (ROWS // HALVES) + within
    exists = (within < ROWS // HALVES) & (row < num_rows // HALVES)
    return tl.where(exists, row + place // WIDTH * (num_rows // HALVES), 0), exists


@triton.jit
def tile_modules(tile, num_rows, second_row, third_row, ROWS: tl.constexpr, GATED: tl.constexpr):
    """The first and the last of an adapter's modules that the rows of ``tile`` belong to."""
    if GATED:
        return 0, 1
    last = tl.minimum(tile * ROWS + ROWS, num_rows) - 1
    return module_of(tile * ROWS, second_row, third_row), module_of(last, second_row, third_row)


@triton.jit
def add_bias(acc, bias_ptr, row):
    """``acc`` [BLOCK_N, BLOCK_M] plus the bias of each row, if there is one."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    return acc


@triton.jit
def split_gated(acc):
    """Gate and up [BLOCK_N / 2, BLOCK_M] of a gated tile."""
    return acc.reshape(2, acc.shape[0] // 2, acc.shape[1]).permute(1, 2, 0).split()


@triton.jit
def gated_tile(gate, up, dtype: tl.constexpr, GATED: tl.constexpr):
    """act(gate) * up, rounded as separate operations would round."""
    gate = gate.to(dtype).to(tl.float32)
    return activate(gate, GATED).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def load_squares(squares_ptr, token, num_tokens, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of squares [BLOCK, BLOCK_M] of parts of each token, out of [PARTS, T]. Load them before the main loop:
    they are used behind it."""
    part = tl.arange(0, BLOCK)[:, None]
    places = squares_ptr + part * num_tokens + token[None, :]
    return tl.load(places, mask=(part < PARTS) & (token < num_tokens)[None, :], other=0.0)


@triton.jit
def inverse_rms(squares, size, eps):
    """Factors for the products of each token [BLOCK_M], from the squares of its ``size`` inputs."""
    return tl.rsqrt(tl.sum(squares, axis=0) / size + eps)


@triton.jit
def tile_places(tile, token, num_tokens, num_columns, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Where in [T, num_columns] the COLUMNS columns from tile * COLUMNS on are [WIDTH, BLOCK_M], and which exist."""
    place = tl.arange(0, WIDTH)
    column = tile * COLUMNS + place
    mask = ((place < COLUMNS) & (column < num_columns))[:, None] & (token < num_tokens)[None, :]
    return token.to(tl.int64)[None, :] * num_columns + column[:, None], mask


@triton.jit
def store_tile(acc, tile, out_ptr, token, num_tokens, num_columns, COLUMNS: tl.constexpr):
    """Store ``acc`` [WIDTH, BLOCK_M] as columns of out [T, num_columns]: COLUMNS of them, from tile * COLUMNS on."""
    places, mask = tile_places(tile, token, num_tokens, num_columns, acc.shape[0], COLUMNS)
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_residual(
    acc, residual, norm, tile, residual_ptr, out_ptr, squares_ptr, token, num_tokens, num_columns, COLUMNS: tl.constexpr
):
    """Add ``acc`` to ``residual`` (both [WIDTH, BLOCK_M]) and store that, that times ``norm`` [WIDTH] as out, and the
    squares' sum of each token as row ``tile`` of squares [.., T]."""
    places, mask = tile_places(tile, token, num_tokens, num_columns, acc.shape[0], COLUMNS)
    x = (acc + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + places, x, mask=mask)
    wide = x.to(tl.float32)
    tl.store(out_ptr + places, (wide * norm.to(tl.float32)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    sums = tl.sum(tl.where(mask, wide * wide, 0.0), axis=0)
    tl.store(squares_ptr + tile * num_tokens + token, sums, mask=token < num_tokens)


@triton.jit
def prefetch_rows(weight_ptr, row, size, begin, LENGTH: tl.constexpr, PIECES: tl.constexpr):
    """Prefetch LENGTH inputs from ``begin`` on of each row of weights into the L2 cache, without waiting."""
    PIECE: tl.constexpr = LENGTH // PIECES
    first = weight_ptr + row.to(tl.int64)[:, None] * size + begin + (tl.arange(0, PIECES) * PIECE)[None, :]
    num_bytes = tl.full(first.shape, PIECE * weight_ptr.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [first, num_bytes], tl.int32, False, 1
    )


def prefetched_numbers(weight: torch.Tensor, splits: int, last: int) -> int:
    """The numbers of each row, from the beginning of each split, that are prefetched into the L2 cache; the ``last``
    split has no more."""
    part, pieces = min(weight.shape[1] // splits, last), 128 // weight.itemsize
    if weight.nbytes > PARTLY_PREFETCHED or weight.shape[1] * weight.itemsize % 16:
        return 0
    if weight.nbytes > WHOLLY_PREFETCHED:
        part = min(part, PREFETCHED_BYTES // (len(weight) * splits * weight.itemsize))
    return part // pieces * pieces
