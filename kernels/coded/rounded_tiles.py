"""Sums of products of a tile of weights of 8 bits with tokens that are rounded to the same 8 bits, on tensor cores.

Both come from shared memory, and no number is converted. Where blocks have scales, tokens have one for each group of
as many columns, and the sum of these columns is multiplied by both in float32.
"""

from __future__ import annotations

from pagebus.kernels.coded.loads import load_tiles
from pagebus.kernels.coded.scales import load_scale
from pagebus.kernels.common.triton import tl, triton


@triton.jit
def rounded_sum(
    acc,  # [BLOCK_N, BLOCK_M] float32, of zeros
    inputs,  # pointers [BLOCK_M, 1] to the first input of each token, int8 or float8_e4m3fn
    tokens,  # pointers [1, BLOCK_M] to the first scale of each token
    present,  # [BLOCK_M]: which tokens there are
    numbers_ptr,  # [N, K], as inputs
    scale_ptr,  # as `Coded` has it
    stride_scale,
    stride_group,
    row,  # [BLOCK_N]: of the weight
    exists,  # [BLOCK_N, 1]: whether they are needed
    begin,  # the first column
    part,  # how many there are
    size,  # K
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a scale, or 0: all
    EVEN_K: tl.constexpr,  # part is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,  # all rows exist
    BLOCK_K: tl.constexpr,  # a divisor of WIDTH
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,  # numbers are int8
):
    """``acc`` plus the products of the tokens with these rows and columns."""
    tl.static_assert(WIDTH % BLOCK_K == 0)
    SUMS: tl.constexpr = tl.int32 if WHOLE else tl.float32
    UNPROMOTED: tl.constexpr = None if WHOLE else BLOCK_K  # Hopper's own sums have 14 bits
    scales, column = scale_ptr + row // HEIGHT * stride_scale, tl.arange(0, BLOCK_K)
    numbers = numbers_ptr + row.to(tl.int64)[:, None] * size + begin + column[None, :]
    inputs += column[None, :]
    there = present[:, None]
    group = begin // WIDTH if WIDTH else 0
    scale = load_scale(scales, group * stride_group)[:, None]
    token = tl.load(tokens + group, mask=present[None, :], other=0.0)
    sums = tl.zeros(acc.shape, SUMS)
    for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        x, w = load_tiles(inputs, numbers, there, exists, column, k, part, EVEN_K, EVEN_N)
        if WIDTH:
            # Before the product, so that they are there when the next one is; the last ones are asked for twice.
            group = tl.minimum(begin + k + BLOCK_K, size - 1) // WIDTH
            next_scale = load_scale(scales, group * stride_group)[:, None]
            next_token = tl.load(tokens + group, mask=present[None, :], other=0.0)
            product = tl.dot(w, tl.trans(x), max_num_imprecise_acc=UNPROMOTED, out_dtype=SUMS)
            acc += product.to(tl.float32) * (scale * token)
            scale, token = next_scale, next_token
        else:
            sums = tl.dot(w, tl.trans(x), sums, max_num_imprecise_acc=UNPROMOTED, out_dtype=SUMS)
    if not WIDTH:
        acc += sums.to(tl.float32) * (scale * token)
    return acc
