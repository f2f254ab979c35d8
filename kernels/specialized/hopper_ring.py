"""Products of up to 16 tokens with words of eight 4-bit codes, for Hopper: words come through a ring in shared memory.
`pagebus.kernels.moe.ring_pairs` has those of single tokens with experts.

The time of such a product is that of reading the words once, so bytes must be on the way all the time, also while the
sums of a tile end. A program for each multiprocessor stays. One warp fills the ring, one tile of 16 rows after the
other, and begins before the kernels before this one have ended. Eight warps have the inputs of all tokens in registers,
where each has its share of the columns, and exchange only the sums of each tile. Where there are more inputs than
registers, a program goes through its tiles once for each part of K, and holds the sums of all meanwhile.
"""

from __future__ import annotations

from typing import Any

from pagebus.kernels.coded.weights import WORDS
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from pagebus.kernels.common.triton import constant, gl, gluon, hopper, tl
from pagebus.kernels.specialized.hopper_fragments import (
    WARPS,
    group_product,
    read_groups,
    sums_factor,
    tile_sums,
    token_operand,
    tokens_factor,
    tokens_layout,
    word_operands,
    words_layout,
)
from pagebus.kernels.specialized.hopper_gemm import activate_gate
from pagebus.kernels.specialized.hopper_word_loads import next_of

ROWS = constant(16)
"""Of a tile. Gates have tiles of their own, each before that of the rows which it multiplies."""


@gluon.constexpr_function
def apart() -> Any:
    """Sums of a tile [WARPS, ROWS, tokens], those of all warps in one thread."""
    return gl.BlockedLayout([8, 1, 1], [1, 4, 8], [1, 4, 2], [2, 1, 0])


@gluon.jit
def ring_barriers(STAGES: gl.constexpr):
    """For each stage, what says that it is full, and that it is empty again."""
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=1)
    return full, empty


@gluon.jit
def fill_ring(
    words, scale, zero, words_shared, scale_shared, zero_shared, full, empty, num_tiles, num_columns,
    STEPS: gl.constexpr, PASSES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """The loading warp: a stage has one part of K of a tile. It waits for no other kernel."""
    HALVES: gl.constexpr = 2 if GATED else 1
    stage = 0
    phase = 1  # what was never filled counts as empty
    for first in range(0, PASSES * STEPS * WARPS, STEPS * WARPS):
        for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            for half in gl.static_range(HALVES):
                row = half * num_columns + tile * ROWS
                hopper.mbarrier.wait(empty.index(stage), phase)
                arrived = full.index(stage)
                hopper.mbarrier.expect(arrived, STEPS * WARPS * ROWS * (64 + 4 + ZEROS))
                for step in gl.static_range(STEPS):
                    at, column = stage * STEPS + step, first + step * WARPS
                    hopper.tma.async_copy_global_to_shared(words, [column, row, 0], arrived, words_shared.index(at))
                    hopper.tma.async_copy_global_to_shared(scale, [column, row], arrived, scale_shared.index(at))
                    if ZEROS:
                        hopper.tma.async_copy_global_to_shared(zero, [column, row], arrived, zero_shared.index(at))
                stage, phase = next_of(stage, phase, STAGES)


@gluon.jit
def read_tokens(
    x_ptr, stride_x, num_tokens, size, first, CODE: gl.constexpr, TOKENS: gl.constexpr, STEPS: gl.constexpr,
    EVEN_K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The operands of all tokens for the tiles of columns from ``first`` on, and their sums, which whole numbers need.
    The last token stands for those that do not exist."""
    TYPE: gl.constexpr = x_ptr.dtype.element_ty
    READ: gl.constexpr = tokens_layout(TOKENS)
    SMALL: gl.constexpr = 1.0 / (sums_factor(CODE, TYPE) * tokens_factor(TYPE))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, READ)))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, READ)))[None, None, :]
    tile = first + gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, READ)))
    inputs = x_ptr + (gl.minimum(token, num_tokens - 1) * stride_x)[None, :, None]
    found: tl.tuple = ()
    sums: tl.tuple = ()
    for step in gl.static_range(STEPS):
        begin = ((tile + step * WARPS) * 128)[:, None, None]
        operands: tl.tuple = ()
        for index in gl.static_range(8):
            k = begin + 16 * index + column
            x = gl.load(inputs + k) if EVEN_K else gl.load(inputs + k, mask=k < size, other=0.0)
            operands += (token_operand(x, gl.DotOperandLayout(1, LAYOUT, 2)),)
        found += (operands,)
        sums += (tile_sums(operands, ROWS, LAYOUT) * SMALL if CODE == WORDS else 0,)
    return found, sums


@gluon.jit
def _widen_scale(scale):
    """As `pagebus.kernels.coded.scales.widen_scale`, of float32 and of exponents."""
    if scale.dtype == gl.uint8:
        return gl.maximum(scale.to(gl.int32) << 23, 1 << 22).to(gl.float32, bitcast=True)
    else:
        return scale


@gluon.jit
def tile_sum(
    x, sums, words_shared, scale_shared, zero_shared, full, empty, stage, phase, CODE: gl.constexpr,
    TYPE: gl.constexpr, ZEROS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The products [ROWS, tokens] of a stage."""
    STEPS: gl.constexpr = len(x)
    GROUPS: gl.constexpr = scale_shared.shape[1] // WARPS
    FACTOR: gl.constexpr = sums_factor(CODE, TYPE)
    acc = gl.full([WARPS, ROWS, x[0][0].shape[2]], 0.0, gl.float32, LAYOUT)
    hopper.mbarrier.wait(full.index(stage), phase)
    for step in gl.static_range(STEPS):
        at = stage * STEPS + step
        words = words_shared.index(at).load(words_layout(ROWS))
        w = word_operands(words, CODE, TYPE, gl.DotOperandLayout(0, LAYOUT, 2))
        scales = read_groups(scale_shared.index(at), GROUPS, LAYOUT)
        for group in gl.static_range(GROUPS):
            product = group_product(w, x[step], CODE, group, GROUPS, LAYOUT)
            if ZEROS:
                zero = read_groups(zero_shared.index(at), GROUPS, LAYOUT)[group]
                product -= sums[step] * zero.to(gl.float32)[:, :, None]
            elif CODE == WORDS:
                product -= sums[step] * 8.0
            acc += product * _widen_scale(scales[group])[:, :, None]
    hopper.mbarrier.arrive(empty.index(stage))
    return gl.sum(gl.convert_layout(acc, apart()), axis=0) * FACTOR


@gluon.jit
def _inverse_rms(
    squares_ptr, num_tokens, size, eps, TOKENS: gl.constexpr, PARTS: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Of each token's inputs, as `pagebus.kernels.linear.epilogue.inverse_rms`."""
    READ: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0])
    part = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, READ))[:, None]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, READ))[None, :]
    squares = gl.load(squares_ptr + part * num_tokens + token, mask=(part < PARTS) & (token < num_tokens), other=0.0)
    inverse = gl.rsqrt(gl.sum(squares, axis=0) / size + eps)
    return gl.convert_layout(inverse, gl.SliceLayout(0, gl.SliceLayout(0, apart())))


@gluon.jit
def add_bias(total, bias_ptr, row, BIASED: gl.constexpr):
    return total + gl.load(bias_ptr + row).to(gl.float32)[:, None] if BIASED else total


@gluon.jit
def _store_residual(
    total, residual_ptr, norm_ptr, out_ptr, squares_ptr, tile, row, token, places, inside, num_tokens
):  # fmt: skip
    """As `pagebus.kernels.linear.epilogue.store_residual`."""
    residual = gl.load(residual_ptr + places, mask=inside, other=0.0).to(gl.float32)
    x = (total + residual).to(residual_ptr.dtype.element_ty)
    gl.store(residual_ptr + places, x, mask=inside)
    wide = x.to(gl.float32)
    out = wide * gl.load(norm_ptr + row).to(gl.float32)[:, None]
    gl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=inside)
    squares = gl.sum(gl.where(inside, wide * wide, 0.0), axis=0)
    gl.store(squares_ptr + tile * num_tokens + token, squares, mask=token < num_tokens)


@gluon.jit
def _finish(
    totals, tile, inverse, bias_ptr, out_ptr, residual_ptr, norm_ptr, new_squares_ptr, num_columns, num_tokens,
    GATED: gl.constexpr, BIASED: gl.constexpr, NORMED: gl.constexpr, ADDED: gl.constexpr,
):  # fmt: skip
    """What becomes of a tile's sums [ROWS, tokens], or of those of gates and of what they multiply."""
    TILE: gl.constexpr = gl.SliceLayout(0, apart())
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    total = totals[0]
    row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
    token = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, TILE))
    places = token.to(gl.int64)[None, :] * num_columns + row[:, None]
    inside = (token < num_tokens)[None, :] & (row >= 0)[:, None]
    if NORMED:
        total *= inverse[None, :]
    total = add_bias(total, bias_ptr, row, BIASED)
    if GATED:
        up = totals[1] * inverse[None, :] if NORMED else totals[1]
        up = add_bias(up, bias_ptr, num_columns + row, BIASED).to(dtype).to(gl.float32)
        total = activate_gate(total.to(dtype).to(gl.float32), GATED).to(dtype).to(gl.float32) * up
    if ADDED:
        _store_residual(
            total, residual_ptr, norm_ptr, out_ptr, new_squares_ptr, tile, row, token, places, inside, num_tokens
        )  # fmt: skip
    else:
        gl.store(out_ptr + places, total.to(dtype), mask=inside)


@gluon.jit
def multiply_ring(
    x_ptr, bias_ptr, out_ptr, squares_ptr, residual_ptr, norm_ptr, new_squares_ptr, words_shared, scale_shared,
    zero_shared, full, empty, num_tiles, num_columns, stride_x, num_tokens, size, eps, TOKENS: gl.constexpr,
    STEPS: gl.constexpr, PASSES: gl.constexpr, HELD: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    BIASED: gl.constexpr, ZEROS: gl.constexpr, NORMED: gl.constexpr, ADDED: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_PARTS: gl.constexpr, EVEN_K: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply."""
    TYPE: gl.constexpr = x_ptr.dtype.element_ty
    HALVES: gl.constexpr = 2 if GATED else 1
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inverse = 1.0
    if NORMED:
        inverse = _inverse_rms(squares_ptr, num_tokens, size, eps, TOKENS, PARTS, BLOCK_PARTS)
    stage = 0
    phase = 0
    if PASSES == 1:
        x, sums = read_tokens(x_ptr, stride_x, num_tokens, size, 0, WORDS, TOKENS, STEPS, EVEN_K, LAYOUT)
        for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            totals: tl.tuple = ()
            for _half in gl.static_range(HALVES):
                totals += (
                    tile_sum(
                        x, sums, words_shared, scale_shared, zero_shared, full, empty, stage, phase, WORDS, TYPE, ZEROS,
                        LAYOUT,
                    ),
                )  # fmt: skip
                stage, phase = next_of(stage, phase, STAGES)
            _finish(
                totals, tile, inverse, bias_ptr, out_ptr, residual_ptr, norm_ptr, new_squares_ptr, num_columns,
                num_tokens, GATED, BIASED, NORMED, ADDED,
            )  # fmt: skip
    else:
        held: tl.tuple = ()
        for _tile in gl.static_range(HELD * HALVES):
            held += (gl.full([ROWS, TOKENS], 0.0, gl.float32, gl.SliceLayout(0, apart())),)
        for part in range(PASSES):
            x, sums = read_tokens(
                x_ptr, stride_x, num_tokens, size, part * (STEPS * WARPS), WORDS, TOKENS, STEPS, EVEN_K, LAYOUT
            )  # fmt: skip
            added: tl.tuple = ()
            for index in gl.static_range(HELD * HALVES):
                total = held[index]
                if gl.program_id(0) + index // HALVES * gl.num_programs(0) < num_tiles:
                    total += tile_sum(
                        x, sums, words_shared, scale_shared, zero_shared, full, empty, stage, phase, WORDS, TYPE, ZEROS,
                        LAYOUT,
                    )  # fmt: skip
                    stage, phase = next_of(stage, phase, STAGES)
                added += (total,)
            held = added
        for index in gl.static_range(HELD):
            tile = gl.program_id(0) + index * gl.num_programs(0)
            if tile < num_tiles:
                totals = (held[index * HALVES], held[index * HALVES + HALVES - 1])
                _finish(
                    totals, tile, inverse, bias_ptr, out_ptr, residual_ptr, norm_ptr, new_squares_ptr, num_columns,
                    num_tokens, GATED, BIASED, NORMED, ADDED,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tiles", "num_tokens"])
def ring_kernel(
    x_ptr,  # [T, K]
    words,  # descriptor of [K / 128, N, 16]
    scale,  # descriptor of [K / 128, N]
    zero,  # the same of zeros, if ZEROS
    bias_ptr,  # [N] if BIASED
    out_ptr,  # [T, N], or [T, N / 2] if GATED
    squares_ptr,  # [PARTS, T] if NORMED: x is divided by its root mean square
    residual_ptr,  # [T, N] if ADDED: the product is added to it, and out is the sum times norm
    norm_ptr,  # [N]
    new_squares_ptr,  # [tiles, T]: sums of squares of the residual
    num_tiles,
    num_columns,  # of out
    stride_x,
    num_tokens,  # T
    size,  # K
    eps,
    TOKENS: gl.constexpr,  # T rounded up: 8 or 16
    STEPS: gl.constexpr,  # of a part of K: eight tiles of 128 columns each
    PASSES: gl.constexpr,  # parts of K
    HELD: gl.constexpr,  # tiles of a program, at most; of interest if there are several passes
    STAGES: gl.constexpr,
    GATED: gl.constexpr,  # 0, or the number of an activation
    BIASED: gl.constexpr,
    ZEROS: gl.constexpr,
    NORMED: gl.constexpr,
    ADDED: gl.constexpr,
    PARTS: gl.constexpr,  # of the norm's sums of squares
    BLOCK_PARTS: gl.constexpr,  # PARTS rounded up
    EVEN_K: gl.constexpr,  # all columns of all steps exist
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    words_shared = gl.allocate_shared_memory(words.dtype, [STAGES * STEPS, WARPS, ROWS, 16], words.layout)
    scale_shared = gl.allocate_shared_memory(scale.dtype, [STAGES * STEPS, WARPS, ROWS], scale.layout)
    zero_shared = scale_shared
    if ZEROS:
        zero_shared = gl.allocate_shared_memory(zero.dtype, [STAGES * STEPS, WARPS, ROWS], zero.layout)
    full, empty = ring_barriers(STAGES)
    gl.warp_specialize([
        (multiply_ring, (
            x_ptr, bias_ptr, out_ptr, squares_ptr, residual_ptr, norm_ptr, new_squares_ptr, words_shared, scale_shared,
            zero_shared, full, empty, num_tiles, num_columns, stride_x, num_tokens, size, eps, TOKENS, STEPS, PASSES,
            HELD, STAGES, GATED, BIASED, ZEROS, NORMED, ADDED, PARTS, BLOCK_PARTS, EVEN_K, PDL,
        )),
        (fill_ring, (
            words, scale, zero, words_shared, scale_shared, zero_shared, full, empty, num_tiles, num_columns, STEPS,
            PASSES, STAGES, GATED, ZEROS,
        )),
    ], [1], [LOADING_REGISTERS])  # fmt: skip
