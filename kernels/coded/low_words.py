"""Sums of products of a tile of words whose groups have something subtracted, with tokens, on tensor cores.

Weights are rounded to 16 bits, as dequantized ones are, slice by slice of 16 columns.
"""

from __future__ import annotations

from pagebus.kernels.coded.products import rounded_product
from pagebus.kernels.coded.scales import load_scale
from pagebus.kernels.coded.unpack import widen_words, word_offset
from pagebus.kernels.coded.weights import WORDS
from pagebus.kernels.coded.word_values import widen_values
from pagebus.kernels.common.triton import tl, triton


@triton.jit
def low_words_sum(
    acc, inputs, present, words_ptr, scale_ptr, zero_ptr, low_ptr, table_ptr, stride_group, scales, row, exists, begin,
    part, size, CODE: tl.constexpr, WIDTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`coded_sum` of words, tile by tile of 128 columns; ``scales`` [BLOCK_N]: where those of the rows begin."""
    place = tl.arange(0, 16)
    words = words_ptr + row.to(tl.int64)[:, None] * (tl.cdiv(size, 128) * 16) + (begin // 8 + place)[None, :]
    TYPE: tl.constexpr = inputs.dtype.element_ty
    # Of a tile, one scale, or one for each eight, four, two or one of its slices; where groups cross tiles, of each.
    GROUP: tl.constexpr = 128 if WIDTH % 128 == 0 else WIDTH if 128 % WIDTH == 0 else 16
    SLICES: tl.constexpr = GROUP // 16
    scale = _each(scale_ptr, scales, begin, size, stride_group, WIDTH, GROUP, True)
    zero, low = scale, scale
    if low_ptr is not None:
        low = _each(low_ptr, scales, begin, size, stride_group, WIDTH, GROUP, False)
    if zero_ptr is not None:
        zero = _each(zero_ptr, scales, begin, size, stride_group, WIDTH, GROUP, False)
    for k in tl.range(0, part, 128, num_stages=STAGES):
        code = tl.load(words + k // 8) if EVEN_N else tl.load(words + k // 8, mask=exists, other=0)
        x = _slices(inputs, place, k, part, present, EVEN_K)
        if CODE > WORDS:
            w = widen_values(code, table_ptr, TYPE, CODE, NATIVE)
        elif zero_ptr is None:
            w = widen_words(code, word_offset(tl.full((1, 1), 8.0, tl.float32), TYPE), TYPE, NATIVE)
        elif GROUP == 128:
            w = widen_words(code, word_offset(zero[0], TYPE)[:, None], TYPE, NATIVE)
        else:
            w = widen_words(code, word_offset(tl.zeros((1, 1), tl.float32), TYPE), TYPE, NATIVE)
        # Before the products, so that they are there when the next are asked for; the last ones are asked for twice.
        following = scale
        if WIDTH:
            following = _each(scale_ptr, scales, begin + k + 128, size, stride_group, WIDTH, GROUP, True)
        if zero_ptr is not None and WIDTH:
            following_zero = _each(zero_ptr, scales, begin + k + 128, size, stride_group, WIDTH, GROUP, False)
        if low_ptr is not None:
            following_low = _each(low_ptr, scales, begin + k + 128, size, stride_group, WIDTH, GROUP, False)
        for group in tl.static_range(128 // GROUP):
            total = acc
            if WIDTH and low_ptr is None:
                total = tl.zeros_like(acc)
            for index in tl.static_range(group * SLICES, group * SLICES + SLICES):
                numbers = w[index]
                if zero_ptr is not None and GROUP < 128:
                    numbers -= zero[group].to(TYPE)[:, None]
                if low_ptr is not None:  # weights are rounded to 16 bits, as dequantized ones are
                    wide = rounded_product(numbers.to(tl.float32), scale[group][:, None], NATIVE)
                    numbers = (wide - low[group][:, None]).to(TYPE)
                total = tl.dot(numbers, tl.trans(x[index]), total, input_precision=PRECISION)
            if WIDTH and low_ptr is None:
                acc += total * scale[group][:, None]
            else:
                acc = total
        scale = following
        if zero_ptr is not None and WIDTH:
            zero = following_zero
        if low_ptr is not None:
            low = following_low
    if not WIDTH:
        acc *= scale[0][:, None]
    return acc


@triton.jit
def _each(
    ptr, scales, column, size, stride_group, WIDTH: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Scales, or zeros, of the groups of the tile from ``column`` on; behind the last one, that. float32."""
    found: tl.tuple = ()
    for group in tl.static_range(128 // GROUP):
        place = scales
        if WIDTH:
            place += tl.minimum(column + group * GROUP, size - 1) // WIDTH * stride_group
        found += (_load(ptr, place, SCALES),)
    return found


@triton.jit
def _load(ptr, places, SCALES: tl.constexpr):
    return load_scale(ptr, places) if SCALES else tl.load(ptr + places).to(tl.float32)


@triton.jit
def _slices(inputs, place, k, part, present, EVEN_K: tl.constexpr):
    """Eight times 16 inputs of each token [BLOCK_M, 16]."""
    found: tl.tuple = ()
    for index in tl.static_range(8):
        column = (k + 16 * index + place)[None, :]
        inside = present if EVEN_K else present & (column < part)
        found += (tl.load(inputs + column, mask=inside, other=0.0),)
    return found
