"""Sums of products of some rows of quantized weights with one token, without tensor cores.

A tile of 128 columns is a row of a small matrix, so that scales of groups multiply whole rows. Each thread reads 8
numbers of 8 bits, or 4 words, and the inputs that belong to them: nothing is exchanged between threads before the end.
"""

from __future__ import annotations

from pagebus.kernels.coded.scales import load_scale
from pagebus.kernels.coded.unpack import widen
from pagebus.kernels.coded.weights import WORDS
from pagebus.kernels.common.triton import tl, triton


@triton.jit
def vector_numbers(numbers_ptr, row, k, size, CODE: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The numbers of ``row`` [N] from column ``k`` on: [N, BLOCK_K / 128, 128], or words [N, BLOCK_K / 128, 16]."""
    if CODE == WORDS:
        tile = k // 128 + tl.arange(0, BLOCK_K // 128)[None, :, None]
        places = tile * 16 + tl.arange(0, 16)[None, None, :]
        length = tl.cdiv(size, 128) * 16
    else:
        # Written so that the compiler reads eight at once, not sixteen: as many as inputs.
        column = tl.arange(0, 128)
        tile = tl.arange(0, BLOCK_K // 128)[None, :, None]
        places = k + tile * 128 + (column // 8 * 8 + column % 8)[None, None, :]
        length = size
    numbers = numbers_ptr + row.to(tl.int64)[:, None, None] * length + places
    if EVEN_K:
        return tl.load(numbers, mask=k < size, other=0)
    else:
        return tl.load(numbers, mask=places < length, other=0)


@triton.jit
def coded_vector(
    numbers,  # the first ones, by `vector_numbers`
    x_ptr,  # [K]
    numbers_ptr,  # as `Coded` has them
    scale_ptr,
    zero_ptr,  # or None
    stride_scale,
    stride_group,
    row,  # [N]: of the weight
    size,  # K
    CODE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_K: tl.constexpr,  # a multiple of 128
    NATIVE: tl.constexpr,
):
    """The products of these rows with the token: float32 [N, 1]."""
    scales = (row // HEIGHT * stride_scale)[:, None]
    acc = tl.zeros(numbers.shape, tl.float32)
    for k in range(0, size, BLOCK_K):
        fetched = vector_numbers(numbers_ptr, row, k + BLOCK_K, size, CODE, EVEN_K, BLOCK_K)
        if CODE == WORDS:
            acc = _add_words(
                acc, numbers, x_ptr, scale_ptr, zero_ptr, scales, stride_group, k, size, WIDTH, EVEN_K, BLOCK_K
            )  # fmt: skip
        else:
            acc = _add_bytes(
                acc, numbers, x_ptr, scale_ptr, zero_ptr, scales, stride_group, k, size, CODE, WIDTH, EVEN_K, BLOCK_K,
                NATIVE,
            )  # fmt: skip
        numbers = fetched
    total = tl.sum(tl.sum(acc, axis=2), axis=1)[:, None]
    if not WIDTH:
        total *= load_scale(scale_ptr, scales)
    return total


@triton.jit
def _add_bytes(
    acc, numbers, x_ptr, scale_ptr, zero_ptr, scales, stride_group, k, size, CODE: tl.constexpr, WIDTH: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    tile = k + tl.arange(0, BLOCK_K // 128)[None, :] * 128
    column = tile[:, :, None] + tl.arange(0, 128)[None, None, :]
    x = _inputs(x_ptr, column, size, EVEN_K)
    w = widen(numbers, tl.float32, CODE, NATIVE)
    group = scales
    if WIDTH:
        tl.static_assert(WIDTH % 128 == 0)
        group += tl.minimum(tile, size - 1) // WIDTH * stride_group
    if zero_ptr is not None:
        w -= tl.load(zero_ptr + group)[:, :, None]
    if WIDTH:
        acc += w * x * load_scale(scale_ptr, group)[:, :, None]
    else:
        acc += w * x
    return acc


@triton.jit
def _inputs(x_ptr, column, size, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x_ptr + column).to(tl.float32)
    else:
        return tl.load(x_ptr + column, mask=column < size, other=0.0).to(tl.float32)


@triton.jit
def _add_words(
    acc, words, x_ptr, scale_ptr, zero_ptr, scales, stride_group, k, size, WIDTH: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = WIDTH if WIDTH > 0 and WIDTH < 128 else 128
    tile = k + tl.arange(0, BLOCK_K // 128)[None, :] * 128
    word = tl.arange(0, 16)
    # Four inputs at once, as there are four words.
    column = tile[:, :, None] + (word // 4 * 4 + word % 4)[None, None, :]
    for group in tl.static_range(128 // GROUP):
        place = scales
        if WIDTH:
            place += tl.minimum(tile + group * GROUP, size - 1) // WIDTH * stride_group
        zero = tl.full((1, 1, 1), 8.0, tl.float32)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + place).to(tl.float32)[:, :, None]
        total = acc
        if WIDTH:
            total = tl.zeros_like(acc)
        for index in tl.static_range(group * (GROUP // 16), (group + 1) * (GROUP // 16)):
            x = _inputs(x_ptr, column + 16 * index, size, EVEN_K)
            half = words if index < 4 else words >> 16
            total += _slice(half, zero, x, 16 ** (index % 4))
        if WIDTH:
            acc += total * load_scale(scale_ptr, place)[:, :, None]
        else:
            acc = total
    return acc


@triton.jit
def _slice(words, zero, x, FACTOR: tl.constexpr):
    """The codes at one place of each word, less zero, times x. They are moved to no other place, and therefore so many
    times too large; the inputs are made smaller by as much. Behind 2^23, whole numbers are a float32's last bits."""
    large = (words & (15 * FACTOR) | 0x4B000000).to(tl.float32, bitcast=True)
    return (large - (8388608.0 + FACTOR * zero)) * (x * (1.0 / FACTOR))
