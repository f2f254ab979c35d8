"""Sums of products of a tile of quantized weights with tokens, on tensor cores.

Weights go from memory through shared memory into registers, where they become 16 bits, and from there straight to the
matrix instruction. Scales of rows multiply the sums; scales of groups multiply the sum of their columns, in float32.
Where something is taken off each group, or a tile has parts of two, numbers are multiplied one by one instead.
"""

from __future__ import annotations

from pagebus.kernels.coded.loads import load_tiles
from pagebus.kernels.coded.products import rounded_product
from pagebus.kernels.coded.scales import load_scale
from pagebus.kernels.coded.unpack import widen
from pagebus.kernels.coded.weights import WORDS
from pagebus.kernels.coded.word_tiles import words_sum
from pagebus.kernels.common.triton import tl, triton


@triton.jit
def coded_sum(
    acc,  # [BLOCK_N, BLOCK_M] float32, of zeros
    inputs,  # pointers [BLOCK_M, 1] to the first input of each token
    present,  # [BLOCK_M, 1]: which tokens there are
    numbers_ptr,  # as `Coded` has them, of a whole weight
    scale_ptr,
    zero_ptr,  # or None, as the following
    low_ptr,
    whole_ptr,
    table_ptr,
    stride_scale,
    stride_group,
    row,  # [BLOCK_N]: of the weight
    exists,  # [BLOCK_N, 1]: whether they are needed
    begin,  # the first column
    part,  # how many there are
    size,  # K
    CODE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN_K: tl.constexpr,  # part is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,  # all rows exist
    BLOCK_K: tl.constexpr,  # of words a multiple of 128; otherwise a divisor of WIDTH, or columns of two groups
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """``acc`` plus the products of the tokens with these rows and columns."""
    scales = row // HEIGHT * stride_scale
    if CODE >= WORDS:
        tl.static_assert(BLOCK_K % 128 == 0)
        acc = words_sum(
            acc, inputs, present, numbers_ptr, scale_ptr, zero_ptr, low_ptr, table_ptr, stride_group, scales, row,
            exists, begin, part, size, CODE, WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
        if whole_ptr is not None:
            acc *= tl.load(whole_ptr + row)[:, None]
    elif low_ptr is not None or WIDTH % BLOCK_K != 0:
        acc = _narrow_sum(
            acc, inputs, present, numbers_ptr, scale_ptr, zero_ptr, low_ptr, stride_group, scales, row, exists, begin,
            part, size, CODE, WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
    else:
        acc = _bytes_sum(
            acc, inputs, present, numbers_ptr, scale_ptr, zero_ptr, stride_group, scales, row, exists, begin, part,
            size, CODE, WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
    return acc


@triton.jit
def _narrow_sum(
    acc, inputs, present, numbers_ptr, scale_ptr, zero_ptr, low_ptr, stride_group, scales, row, exists, begin, part,
    size, CODE: tl.constexpr, WIDTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`coded_sum` of 8 bits with lows, or of which a tile has columns of two groups: weights are rounded to 16 bits, as
    dequantized ones are."""
    column = tl.arange(0, BLOCK_K)
    TYPE: tl.constexpr = inputs.dtype.element_ty
    numbers = numbers_ptr + row.to(tl.int64)[:, None] * size + begin + column[None, :]
    inputs += column[None, :]
    for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        x, w = load_tiles(inputs, numbers, present, exists, column, k, part, EVEN_K, EVEN_N)
        first = (begin + k) // WIDTH
        last = tl.minimum(begin + k + BLOCK_K, size) - 1
        one, two = scales + first * stride_group, scales + last // WIDTH * stride_group
        same = (tl.minimum(begin + k + column, size - 1) // WIDTH == first)[None, :]
        wide = widen(w, tl.float32, CODE, NATIVE)
        if zero_ptr is not None:
            wide -= _of_either(tl.load(zero_ptr + one), tl.load(zero_ptr + two), same, WIDTH % BLOCK_K == 0)
        scale = _of_either(load_scale(scale_ptr, one), load_scale(scale_ptr, two), same, WIDTH % BLOCK_K == 0)
        wide = rounded_product(wide, scale, NATIVE)
        if low_ptr is not None:
            wide -= _of_either(tl.load(low_ptr + one), tl.load(low_ptr + two), same, WIDTH % BLOCK_K == 0)
        acc = tl.dot(wide.to(TYPE), tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _of_either(one, two, first, ONE: tl.constexpr):
    """Of the first group [N] where ``first`` [1, K], else of the second."""
    if ONE:
        return one[:, None]
    else:
        return tl.where(first, one[:, None], two[:, None])


@triton.jit
def _bytes_sum(
    acc, inputs, present, numbers_ptr, scale_ptr, zero_ptr, stride_group, scales, row, exists, begin, part, size,
    CODE: tl.constexpr, WIDTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`coded_sum` of 8 bits."""
    column = tl.arange(0, BLOCK_K)
    TYPE: tl.constexpr = inputs.dtype.element_ty
    numbers = numbers_ptr + row.to(tl.int64)[:, None] * size + begin + column[None, :]
    inputs += column[None, :]
    if WIDTH:
        tl.static_assert(WIDTH % BLOCK_K == 0)
        scale = load_scale(scale_ptr, scales + begin // WIDTH * stride_group)
    elif zero_ptr is not None:
        zero = tl.load(zero_ptr + scales).to(TYPE)[:, None]
    for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        x, w = load_tiles(inputs, numbers, present, exists, column, k, part, EVEN_K, EVEN_N)
        w = widen(w, TYPE, CODE, NATIVE)
        if zero_ptr is not None:
            if WIDTH:
                zero = tl.load(zero_ptr + scales + (begin + k) // WIDTH * stride_group).to(TYPE)[:, None]
            w -= zero
        if WIDTH:
            # Before the product, so that it is there when the next one is; the last one is asked for twice.
            behind = tl.minimum(begin + k + BLOCK_K, size - 1)
            following = load_scale(scale_ptr, scales + behind // WIDTH * stride_group)
            acc += tl.dot(w, tl.trans(x), input_precision=PRECISION) * scale[:, None]
            scale = following
        else:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    if not WIDTH:
        acc *= load_scale(scale_ptr, scales)[:, None]
    return acc
