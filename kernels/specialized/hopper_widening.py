"""Products of 33 and more tokens with words of eight 4-bit codes, for Hopper: four warps widen, eight multiply.

It is the kernel of `pagebus.kernels.specialized.hopper_gemm` with other warps in front. Words come through the tensor
memory accelerator, some steps of 128 columns ahead. Four warps make numbers of 16 bits of them, once for all tokens of
a tile, and lay these into the ring of stages, while the others multiply the stages before. What is multiplied is the
dequantized weight, rounded once: a scale of float32 is two numbers of 16 bits, whose products are added up.

Ordinary loads would not do: what is written to shared memory has to be seen by the tensor cores, and the fence for that
waits for every load that is on its way.
"""

from __future__ import annotations

from pagebus.kernels.coded.unpack import EIGHT_WITH_OFFSET, WORDS_BFLOAT16, WORDS_FLOAT16
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from pagebus.kernels.common.triton import constant, gl, gluon, hopper, tl
from pagebus.kernels.specialized.hopper_gemm import copy_box, multiply_all, place_of

_SCALED_BFLOAT16 = constant("{ .reg .b32 low; mul.rn.bf16x2 low, $1, $3; fma.rn.bf16x2 $0, $1, $2, low; }")
_SCALED_FLOAT16 = constant("{ .reg .b32 low; mul.rn.f16x2 low, $1, $3; fma.rn.f16x2 $0, $1, $2, low; }")


@gluon.jit
def _load_words(
    words, scale, zero, words_shared, scale_shared, zero_shared, arrived, slot, row, num_rows, column, stride_group,
    AHEAD: gl.constexpr, WIDTH: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Start to copy the words of a tile from ``column`` of 128 on, with scales and zeros."""
    HALVES: gl.constexpr = words_shared.shape[0] // AHEAD
    SCALES: gl.constexpr = scale_shared.shape[0] // words_shared.shape[0]
    PART: gl.constexpr = words_shared.shape[1]
    BYTES: gl.constexpr = HALVES * PART * (64 + 4 * SCALES + HALVES * ZEROS)
    hopper.mbarrier.expect(arrived.index(slot), BYTES)
    for half in gl.static_range(HALVES):
        place = row + half * (num_rows // 2)
        target = slot * HALVES + half
        copy_box(words, place, column * 16, arrived.index(slot), words_shared.index(target))
        for group in gl.static_range(SCALES):
            first = place
            if WIDTH:
                first += (column * 128 + group * (128 // SCALES)) // WIDTH * stride_group
            at = scale_shared.index((slot * SCALES + group) * HALVES + half)
            hopper.tma.async_copy_global_to_shared(scale, [first], arrived.index(slot), at)
            if ZEROS:  # of gate and up each as many as of both, at the places where they are in the tile
                first -= half * PART
                hopper.tma.async_copy_global_to_shared(zero, [first], arrived.index(slot), zero_shared.index(target))


@gluon.jit
def _whole(shared, count: gl.constexpr, index):
    """One of ``count`` parts, gate and up under each other."""
    HEIGHT: gl.constexpr = shared.shape[0] // count * shared.shape[1]
    if len(shared.shape) == 2:
        together = shared._reinterpret(shared.dtype, [count, HEIGHT], shared.layout)
    else:
        together = shared._reinterpret(shared.dtype, [count, HEIGHT, shared.shape[2]], shared.layout)
    return together.index(index)


@gluon.jit
def like(values, words, TYPE: gl.constexpr):
    """[rows] beside each word, in ``TYPE``."""
    return gl.expand_dims(values.to(TYPE), 1).broadcast_to(words.shape)


@gluon.jit
def _widen(words, zero, scales, TYPE: gl.constexpr):
    """Words [rows, 16] as eight [rows, 16] of the dequantized weight."""
    LARGE: gl.constexpr = 128.0 if gl.bfloat16 == TYPE else 1024.0
    CODE: gl.constexpr = WORDS_BFLOAT16 if gl.bfloat16 == TYPE else WORDS_FLOAT16
    if zero is not None:
        offset = like(-LARGE - zero.to(gl.float32), words, TYPE)
    else:
        offset = gl.full(words.shape, -8.0 - LARGE, TYPE, words.type.layout)
    numbers = gl.inline_asm_elementwise(
        CODE, EIGHT_WITH_OFFSET, [words, offset], is_pure=True, pack=2,
        dtype=(
            TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value,
        ),
    )  # fmt: skip
    found: tl.tuple = ()
    for index in gl.static_range(8):
        found += (scale_numbers(numbers[index], scales[index * len(scales) // 8], TYPE),)
    return found


@gluon.jit
def scale_numbers(numbers, scale, TYPE: gl.constexpr):
    """Numbers [rows, 16] times scale [rows] float32, rounded once."""
    CODE: gl.constexpr = _SCALED_BFLOAT16 if gl.bfloat16 == TYPE else _SCALED_FLOAT16
    upper = scale.to(TYPE)
    lower = scale - upper.to(gl.float32)
    return gl.inline_asm_elementwise(
        CODE, "=r,r,r,r", [numbers, like(upper, numbers, TYPE), like(lower, numbers, TYPE)], TYPE.value, True, 2
    )


@gluon.jit
def beside(a, b, c, d):
    """Four slices [rows, 16] of columns: [rows, 64]."""
    pairs = gl.join(gl.join(a, c), gl.join(b, d))
    return pairs.permute(0, 2, 3, 1).reshape(a.shape[0], 64)


@gluon.jit
def _load_tokens(x, token, k, x_shared, full, empty, stage, phase):
    """Into a stage, once that is empty."""
    BYTES: gl.constexpr = 2 * x.block_shape[0] * x.block_shape[1]
    hopper.mbarrier.wait(empty.index(stage), phase)
    hopper.mbarrier.expect(full.index(stage), BYTES)
    copy_box(x, token, k, full.index(stage), x_shared.index(stage))


@gluon.jit
def next_of(stage, phase, COUNT: gl.constexpr):
    """Of a ring, and the phase of its barriers."""
    stage += 1
    if stage == COUNT:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def load_all_words(
    x, words, scale, zero, x_shared, words_shared, scale_shared, zero_shared, full, empty, arrived, taken, num_tiles,
    token_tiles, row_tiles, num_rows, part, stride_group, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    WIDTH: gl.constexpr, ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: words some steps ahead of tokens. It waits for the kernels before this one on behalf of all:
    nothing is multiplied or stored before its tokens are there."""
    TOKENS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    PART: gl.constexpr = words_shared.shape[1]
    steps = part // (2 * DEPTH)
    count = gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0)) * steps
    stage = 0
    phase = 1  # what was never filled counts as empty
    slot = 0
    slot_phase = 1
    for step in range(-AHEAD + 1, count):
        ahead = step + AHEAD - 1
        if PDL and step == 0:
            gdc_launch_dependents()
            gdc_wait()
        if step >= 0:
            token_tile, _, split = place_of(
                gl.program_id(0) + step // steps * gl.num_programs(0), token_tiles, row_tiles
            )
            k = split * part + step % steps * (2 * DEPTH)
            _load_tokens(x, token_tile * TOKENS, k, x_shared, full, empty, stage, phase)
            stage, phase = next_of(stage, phase, STAGES)
            _load_tokens(x, token_tile * TOKENS, k + DEPTH, x_shared, full, empty, stage, phase)
            stage, phase = next_of(stage, phase, STAGES)
        if ahead < count:
            _, row_tile, split = place_of(
                gl.program_id(0) + ahead // steps * gl.num_programs(0), token_tiles, row_tiles
            )
            hopper.mbarrier.wait(taken.index(slot), slot_phase)
            _load_words(
                words, scale, zero, words_shared, scale_shared, zero_shared, arrived, slot, row_tile * PART, num_rows,
                split * steps + ahead % steps, stride_group, AHEAD, WIDTH, ZEROS,
            )  # fmt: skip
            slot, slot_phase = next_of(slot, slot_phase, AHEAD)


@gluon.jit
def _widen_all(
    w_shared, words_shared, scale_shared, zero_shared, full, empty, arrived, taken, num_tiles, part,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """The widening warps: two stages at a time."""
    TYPE: gl.constexpr = w_shared[0].dtype
    SCALES: gl.constexpr = scale_shared.shape[0] // words_shared.shape[0]
    HALVES: gl.constexpr = words_shared.shape[0] // AHEAD
    ROWS: gl.constexpr = HALVES * words_shared.shape[1]
    # Each thread has eight words of a row: 16 bytes of each slice of columns, which do not collide with others'.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [64, 0]], [[1, 0], [2, 0], [4, 0], [8, 0], [0, 8]], [[16, 0], [32, 0]], [], [ROWS, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    first = 0
    phase = 1
    slot = 0
    slot_phase = 0
    for _ in range(gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0)) * (part // 128)):
        hopper.mbarrier.wait(arrived.index(slot), slot_phase)
        scales: tl.tuple = ()
        for group in gl.static_range(SCALES):
            scales += (_whole(scale_shared, AHEAD * SCALES, slot * SCALES + group).load(ROW),)
        zeros = None
        if ZEROS:
            zeros = zero_shared.index(slot * HALVES).load(ROW)
            if HALVES == 2:
                up = zero_shared.index(slot * HALVES + 1).load(ROW)
                zeros = gl.where(gl.arange(0, ROWS, layout=ROW) < ROWS // 2, zeros, up)
        w = _widen(_whole(words_shared, AHEAD, slot).load(LAYOUT), zeros, scales, TYPE)
        second, second_phase = next_of(first, phase, STAGES)
        hopper.mbarrier.wait(empty.index(first), phase)
        hopper.mbarrier.wait(empty.index(second), second_phase)
        _whole(w_shared[0], STAGES, first).store(beside(w[0], w[1], w[2], w[3]))
        _whole(w_shared[0], STAGES, second).store(beside(w[4], w[5], w[6], w[7]))
        hopper.fence_async_shared()
        hopper.mbarrier.arrive(full.index(first))
        hopper.mbarrier.arrive(full.index(second))
        hopper.mbarrier.arrive(taken.index(slot))
        slot, slot_phase = next_of(slot, slot_phase, AHEAD)
        first, phase = next_of(second, second_phase, STAGES)


@gluon.jit(do_not_specialize=["num_tiles", "token_tiles", "row_tiles", "num_tokens"])
def widening_kernel(
    x,  # descriptor of [T, K]
    words,  # descriptor of [N, K / 8]
    scale,  # descriptor of all scales, as one row
    zero,  # the same of zeros, if ZEROS
    bias_ptr,  # [N] if BIASED
    out_ptr,  # [T, N], or [T, N / 2] if GATED; several such sums [SPLITS, T, N] float32
    num_tiles,
    token_tiles,
    row_tiles,
    num_tokens,  # T
    num_rows,  # N
    part,  # K / SPLITS
    stride_group,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    ZEROS: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a multiplying thread
    WIDENING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    HALVES: gl.constexpr = 2 if GATED else 1
    PART: gl.constexpr = ROWS // HALVES
    SCALES: gl.constexpr = 128 // WIDTH if WIDTH % 128 else 1
    TOKENS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    x_shared = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], x.layout)
    x_groups = x_shared._reinterpret(x.dtype, [STAGES * GROUPS, TOKENS // GROUPS, DEPTH], x.layout)
    w_shared = (gl.allocate_shared_memory(x.dtype, [STAGES * HALVES, PART, DEPTH], x.layout),)
    words_shared = gl.allocate_shared_memory(words.dtype, [AHEAD * HALVES, PART, 16], words.layout)
    scale_shared = gl.allocate_shared_memory(scale.dtype, [AHEAD * SCALES * HALVES, PART], scale.layout)
    zero_shared = scale_shared
    if ZEROS:
        zero_shared = gl.allocate_shared_memory(zero.dtype, [AHEAD * HALVES, ROWS], zero.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    arrived = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], barriers)
    taken = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], barriers)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=2)
        hopper.mbarrier.init(empty.index(stage), count=GROUPS)
    for slot in gl.static_range(AHEAD):
        hopper.mbarrier.init(arrived.index(slot), count=1)
        hopper.mbarrier.init(taken.index(slot), count=1)
    gl.warp_specialize([
        (multiply_all, (
            0, x_groups, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, num_tokens,
            num_rows, part, ROWS, STAGES, GROUPS, GATED, SPLITS, BIASED,
        )),
        (multiply_all, (
            1, x_groups, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, num_tokens,
            num_rows, part, ROWS, STAGES, GROUPS, GATED, SPLITS, BIASED,
        )),
        (_widen_all, (
            w_shared, words_shared, scale_shared, zero_shared, full, empty, arrived, taken, num_tiles, part, STAGES,
            AHEAD, ZEROS,
        )),
        (load_all_words, (
            x, words, scale, zero, x_shared, words_shared, scale_shared, zero_shared, full, empty, arrived, taken,
            num_tiles, token_tiles, row_tiles, num_rows, part, stride_group, STAGES, AHEAD, WIDTH, ZEROS, PDL,
        )),
    ], [4, 4, 1], [REGISTERS, WIDENING_REGISTERS, LOADING_REGISTERS])  # fmt: skip
