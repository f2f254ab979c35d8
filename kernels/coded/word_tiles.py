"""Sums of products of a tile of words of eight 4-bit codes with tokens, on tensor cores.

Word j of a tile of 128 columns holds columns j, j + 16, ... j + 112. The same place of 16 words is therefore a slice of
16 columns, as wide as a matrix instruction: nothing is exchanged between threads.

Scales multiply sums, in float32. So do zeros with few tokens: numbers are multiplied as they come out of the words,
and what they are too large by is taken off, times the sum of the inputs, which the tensor cores give as well. Nothing
stands then between a word and the matrix instruction. With more tokens that would be more work than it saves.
"""

from __future__ import annotations

from pagebus.kernels.coded.low_words import low_words_sum
from pagebus.kernels.coded.scales import widen_scale
from pagebus.kernels.coded.unpack import large_words, ones_like_words, widen_words, word_excess, word_offset
from pagebus.kernels.coded.weights import WORDS
from pagebus.kernels.coded.word_values import widen_values
from pagebus.kernels.common.triton import constant, tl, triton

FEW_TOKENS = constant(32)


@triton.jit
def words_sum(
    acc, inputs, present, words_ptr, scale_ptr, zero_ptr, low_ptr, table_ptr, stride_group, scales, row, exists, begin,
    part, size, CODE: tl.constexpr, WIDTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`coded_sum` of words, some tiles of 128 columns at a time; ``scales`` [BLOCK_N]: where those of the rows begin.

    Scales and zeros are asked for one step ahead, as they come from memory, and widened where they are needed."""
    if low_ptr is not None:
        acc = low_words_sum(
            acc, inputs, present, words_ptr, scale_ptr, zero_ptr, low_ptr, table_ptr, stride_group, scales, row, exists,
            begin, part, size, CODE, WIDTH, EVEN_K, EVEN_N, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
    elif BLOCK_K > 128:
        acc = deep_words_sum(
            acc, inputs, present, words_ptr, scale_ptr, zero_ptr, table_ptr, stride_group, scales, row, exists, begin,
            part, size, CODE, WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
    else:
        acc = flat_words_sum(
            acc, inputs, present, words_ptr, scale_ptr, zero_ptr, table_ptr, stride_group, scales, row, exists, begin,
            part, size, CODE, WIDTH, EVEN_K, EVEN_N, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
    return acc


@triton.jit
def flat_words_sum(
    acc, inputs, present, words_ptr, scale_ptr, zero_ptr, table_ptr, stride_group, scales, row, exists, begin, part,
    size, CODE: tl.constexpr, WIDTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`words_sum` of one tile of 128 columns at a time."""
    # Of a tile, one scale, or one for each eight, four, two or one of its slices; where groups cross tiles, of each.
    GROUP: tl.constexpr = 128 if WIDTH % 128 == 0 else WIDTH if 128 % WIDTH == 0 else 16
    TYPE: tl.constexpr = inputs.dtype.element_ty
    FEW: tl.constexpr = acc.shape[1] <= FEW_TOKENS and TYPE.primitive_bitwidth == 16
    SUMS: tl.constexpr = FEW and CODE == WORDS and GROUP >= 32
    first = tl.multiple_of(tl.cast(begin, tl.int32) // 8, 16) + tl.arange(0, 16)
    words = words_ptr + row.to(tl.int64)[:, None] * (tl.cdiv(size, 128) * 16) + first[None, :]
    scale = _groups(scale_ptr, scales, begin, size, stride_group, WIDTH, GROUP)
    zero = scale
    if zero_ptr is not None:
        zero = _groups(zero_ptr, scales, begin, size, stride_group, WIDTH, GROUP)
    for k in tl.range(0, part, 128, num_stages=STAGES):
        following, following_zero = scale, zero
        if WIDTH:
            following = _groups(scale_ptr, scales, begin + k + 128, size, stride_group, WIDTH, GROUP)
            if zero_ptr is not None:
                following_zero = _groups(zero_ptr, scales, begin + k + 128, size, stride_group, WIDTH, GROUP)
        code = _load_words(words + k // 8, exists, EVEN_N)
        w = _numbers(code, zero, table_ptr, zero_ptr is None, TYPE, CODE, GROUP, SUMS, NATIVE)
        for group in tl.static_range(128 // GROUP):
            x = _inputs(inputs, k + GROUP * group, part, present, GROUP, EVEN_K)
            acc = _add_group(
                acc, code, w, x, scale[group], zero[group], group, zero_ptr is None, CODE, GROUP, SUMS, PRECISION,
                NATIVE,
            )  # fmt: skip
        scale, zero = following, following_zero
    return acc


@triton.jit
def deep_words_sum(
    acc, inputs, present, words_ptr, scale_ptr, zero_ptr, table_ptr, stride_group, scales, row, exists, begin, part,
    size, CODE: tl.constexpr, WIDTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`words_sum` of several tiles of 128 columns at a time, one for each warp."""
    GROUP: tl.constexpr = 128 if WIDTH % 128 == 0 else WIDTH if 128 % WIDTH == 0 else 16
    TYPE: tl.constexpr = inputs.dtype.element_ty
    FEW: tl.constexpr = acc.shape[1] <= FEW_TOKENS and TYPE.primitive_bitwidth == 16
    SUMS: tl.constexpr = FEW and CODE == WORDS and GROUP >= 32
    TILES: tl.constexpr = BLOCK_K // 128
    first = tl.arange(0, TILES)[:, None, None] * 128
    words = words_ptr + (row.to(tl.int64)[:, None] * (tl.cdiv(size, 128) * 16))[None, :, :]
    words += tl.multiple_of(tl.cast(begin, tl.int32) // 8, 16) + first // 8 + tl.arange(0, 16)[None, None, :]
    inputs, present, exists = inputs[None, :, :] + first, present[None, :, :], exists[None, :, :]
    column = begin + tl.arange(0, TILES)[:, None] * 128
    scales = scales[None, :]
    scale = _deep_groups(scale_ptr, scales, column, size, stride_group, WIDTH, GROUP)
    zero = scale
    if zero_ptr is not None:
        zero = _deep_groups(zero_ptr, scales, column, size, stride_group, WIDTH, GROUP)
    sums = tl.zeros((TILES, acc.shape[0], acc.shape[1]), tl.float32)
    for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        following, following_zero = scale, zero
        if WIDTH:
            following = _deep_groups(scale_ptr, scales, column + k + BLOCK_K, size, stride_group, WIDTH, GROUP)
            if zero_ptr is not None:
                following_zero = _deep_groups(zero_ptr, scales, column + k + BLOCK_K, size, stride_group, WIDTH, GROUP)
        there = exists if EVEN_K else exists & (k + first < part)
        code = _load_words(words + k // 8, there, EVEN_N and EVEN_K)
        w = _numbers(code, zero, table_ptr, zero_ptr is None, TYPE, CODE, GROUP, SUMS, NATIVE)
        for group in tl.static_range(128 // GROUP):
            at = k + GROUP * group + tl.arange(0, GROUP)[None, None, :]
            inside = present if EVEN_K else present & (first + at < part)
            x = tl.load(inputs + at, mask=inside, other=0.0).permute(0, 2, 1)
            sums = _add_group(
                sums, code, w, x, scale[group], zero[group], group, zero_ptr is None, CODE, GROUP, SUMS, PRECISION,
                NATIVE,
            )  # fmt: skip
        scale, zero = following, following_zero
    return acc + tl.sum(sums, axis=0)


@triton.jit
def _deep_groups(ptr, scales, column, size, stride_group, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Scales, or zeros [TILES, N], of the groups of tiles from ``column`` [TILES, 1] on."""
    found: tl.tuple = ()
    for group in tl.static_range(128 // GROUP):
        place = scales + column * 0
        if WIDTH:
            place += tl.minimum(column + group * GROUP, size - 1) // WIDTH * stride_group
        found += (tl.load(ptr + place),)
    return found


@triton.jit
def _add_group(
    acc, code, w, x, scale, zero, group: tl.constexpr, SYMMETRIC: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The products of a group, with its inputs [GROUP, BLOCK_M], added to ``acc``."""
    numbers = _beside(w, group, GROUP)
    if CODE == WORDS and not SYMMETRIC and GROUP < 128 and not SUMS:
        numbers -= tl.expand_dims(zero.to(x.dtype), -1)
    total = tl.dot(numbers, x, input_precision=PRECISION)
    if SUMS:
        ones = tl.dot(_beside(ones_like_words(code, x.dtype, NATIVE), group, GROUP), x, input_precision=PRECISION)
        if SYMMETRIC:
            total -= ones * word_excess(8.0, x.dtype)
        else:
            total -= ones * tl.expand_dims(word_excess(zero, x.dtype), -1)
    return acc + total * tl.expand_dims(widen_scale(scale), -1)


@triton.jit
def _groups(ptr, scales, column, size, stride_group, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Scales, or zeros, of the groups of a tile from ``column`` on, as they are stored; behind the last one, that."""
    found: tl.tuple = ()
    for group in tl.static_range(128 // GROUP):
        place = scales
        if WIDTH:
            place += tl.minimum(column + group * GROUP, size - 1) // WIDTH * stride_group
        found += (tl.load(ptr + place),)
    return found


@triton.jit
def _load_words(words, there, ALL: tl.constexpr):
    return tl.load(words) if ALL else tl.load(words, mask=there, other=0)


@triton.jit
def _inputs(inputs, begin, part, present, GROUP: tl.constexpr, EVEN_K: tl.constexpr):
    """[GROUP, BLOCK_M]"""
    column = (begin + tl.arange(0, GROUP))[None, :]
    return tl.trans(tl.load(inputs + column, mask=present if EVEN_K else present & (column < part), other=0.0))


@triton.jit
def _numbers(
    code, zero, table_ptr, SYMMETRIC: tl.constexpr, TYPE: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, SUMS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Of a tile, eight [N, 16]. With ``SUMS``, and zeros of groups within the tile, they have yet to be taken off."""
    if CODE > WORDS:
        w = widen_values(code, table_ptr, TYPE, CODE, NATIVE)
    elif SUMS:
        w = large_words(code, TYPE, NATIVE)
    elif SYMMETRIC:
        w = widen_words(code, word_offset(tl.full(code.shape, 8.0, tl.float32), TYPE), TYPE, NATIVE)
    elif GROUP == 128:
        w = widen_words(code, tl.expand_dims(word_offset(zero[0], TYPE), -1), TYPE, NATIVE)
    else:
        w = widen_words(code, word_offset(tl.zeros(code.shape, tl.float32), TYPE), TYPE, NATIVE)
    return w


@triton.jit
def _beside(w, group: tl.constexpr, GROUP: tl.constexpr):
    """The group's slices [.., N, 16] of a tile's eight, beside each other: [.., N, GROUP]."""
    if GROUP == 16:
        found = w[group]
    elif GROUP == 32:
        found = _flat(tl.join(w[2 * group], w[2 * group + 1]), w[0].shape, GROUP)
    elif GROUP == 64:
        even, odd = tl.join(w[4 * group], w[4 * group + 2]), tl.join(w[4 * group + 1], w[4 * group + 3])
        found = _flat(tl.join(even, odd), w[0].shape, GROUP)
    else:
        even, odd = tl.join(tl.join(w[0], w[4]), tl.join(w[2], w[6])), tl.join(tl.join(w[1], w[5]), tl.join(w[3], w[7]))
        found = _flat(tl.join(even, odd), w[0].shape, GROUP)
    return found


@triton.jit
def _flat(pairs, shape: tl.constexpr, GROUP: tl.constexpr):
    """[.., N, 16, 2, ..] -> [.., N, GROUP], the last dimensions first."""
    if len(shape) == 2:
        if GROUP == 32:
            return pairs.permute(0, 2, 1).reshape(shape[0], GROUP)
        elif GROUP == 64:
            return pairs.permute(0, 2, 3, 1).reshape(shape[0], GROUP)
        else:
            return pairs.permute(0, 2, 3, 4, 1).reshape(shape[0], GROUP)
    elif GROUP == 32:
        return pairs.permute(0, 1, 3, 2).reshape(shape[0], shape[1], GROUP)
    elif GROUP == 64:
        return pairs.permute(0, 1, 3, 4, 2).reshape(shape[0], shape[1], GROUP)
    else:
        return pairs.permute(0, 1, 3, 4, 5, 2).reshape(shape[0], shape[1], GROUP)
