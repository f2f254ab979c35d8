"""What the kernels for few tokens share: which rows of the weights are a tile's, and how a finished tile is stored."""

from __future__ import annotations

from kernels.triton_import import tl, triton


@triton.jit
def tile_rows(tile, num_rows, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The rows of W [BLOCK_N] in ``tile``, and which exist: the first ROWS, as far as there are any.

    ``GATED``: half of the tile is from the first half of W, half from the second (gate | up), for silu(gate) * up.
    """
    place = tl.arange(0, BLOCK_N)
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = BLOCK_N // HALVES
    within = place % WIDTH
    row = tile * (ROWS // HALVES) + within
    exists = (within < ROWS // HALVES) & (row < num_rows // HALVES)
    return tl.where(exists, row + place // WIDTH * (num_rows // HALVES), 0), exists


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
def silu_mul_tile(gate, up, dtype: tl.constexpr):
    """silu(gate) * up, rounded as separate operations would round."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def store_tile(acc, tile, out_ptr, token, num_tokens, num_columns, COLUMNS: tl.constexpr):
    """Store ``acc`` [WIDTH, BLOCK_M] as columns of out [T, num_columns]: COLUMNS of them, from tile * COLUMNS on."""
    place = tl.arange(0, acc.shape[0])
    column = tile * COLUMNS + place
    mask = ((place < COLUMNS) & (column < num_columns))[:, None] & (token < num_tokens)[None, :]
    out = out_ptr + token.to(tl.int64)[None, :] * num_columns + column[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def prefetch_rows(weight_ptr, row, size, begin, LENGTH: tl.constexpr, PIECES: tl.constexpr):
    """Ask for LENGTH inputs from ``begin`` on of each row of weights in the L2 cache, and do not wait for them."""
    PIECE: tl.constexpr = LENGTH // PIECES
    first = weight_ptr + row.to(tl.int64)[:, None] * size + begin + (tl.arange(0, PIECES) * PIECE)[None, :]
    num_bytes = tl.full(first.shape, PIECE * weight_ptr.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [first, num_bytes], tl.int32, False, 1
    )
