"""Products of 33 and more tokens with words of eight 4-bit codes, for Hopper: the warps that multiply widen words.

A word's codes belong to eight steps of 16 columns, so that a thread reads just the words of which it has to hold the
numbers for the matrix instruction. Weights are therefore that instruction's registers, and tokens come from shared
memory. While one half of a step's columns is multiplied, the next half is widened. The assembler keeps that order only
where a branch is between widening and the end of the product, as each wait has one. Nothing is written to shared memory
but what the tensor memory accelerator brings, and words take little of the L2 cache's rate.

What is multiplied is the dequantized weight, rounded once: a scale of float32 is two numbers of 16 bits, whose products
are added up.
"""

from __future__ import annotations

from pagebus.kernels.coded.unpack import FOUR_WITH_OFFSET, LOWER_BFLOAT16, LOWER_FLOAT16, UPPER_BFLOAT16, UPPER_FLOAT16
from pagebus.kernels.common.triton import constant, gl, gluon, hopper, tl
from pagebus.kernels.specialized.hopper_gemm import activate_gate, place_of
from pagebus.kernels.specialized.hopper_word_loads import load_all_words, next_of

_SCALED_BFLOAT16 = constant("{ .reg .b32 low; mul.rn.bf16x2 low, $1, $3; fma.rn.bf16x2 $0, $1, $2, low; }")
_SCALED_FLOAT16 = constant("{ .reg .b32 low; mul.rn.f16x2 low, $1, $3; fma.rn.f16x2 $0, $1, $2, low; }")


@gluon.jit
def _like(values, words, TYPE: gl.constexpr):
    """[rows] beside each word, in ``TYPE``."""
    return gl.expand_dims(values.to(TYPE), 1).broadcast_to(words.shape)


@gluon.jit
def _scale(numbers, scale, TYPE: gl.constexpr):
    """Numbers [rows, 16] times scale [rows] float32, rounded once."""
    CODE: gl.constexpr = _SCALED_BFLOAT16 if gl.bfloat16 == TYPE else _SCALED_FLOAT16
    upper = scale.to(TYPE)
    lower = scale - upper.to(gl.float32)
    return gl.inline_asm_elementwise(
        CODE, "=r,r,r,r", [numbers, _like(upper, numbers, TYPE), _like(lower, numbers, TYPE)], TYPE.value, True, 2
    )


@gluon.jit
def _beside(a, b, c, d):
    """Four slices [rows, 16] of columns: [rows, 64]."""
    pairs = gl.join(gl.join(a, c), gl.join(b, d))
    return pairs.permute(0, 2, 3, 1).reshape(a.shape[0], 64)


@gluon.jit
def _parts(shared, HEIGHT: gl.constexpr):
    """Rows in shared memory as parts of ``HEIGHT``."""
    COUNT: gl.constexpr = shared.shape[0] * shared.shape[1] // HEIGHT
    if len(shared.shape) == 2:
        return shared._reinterpret(shared.dtype, [COUNT, HEIGHT], shared.layout)
    else:
        return shared._reinterpret(shared.dtype, [COUNT, HEIGHT, shared.shape[2]], shared.layout)


@gluon.jit
def _by_turns(gate, up, LAYOUT: gl.constexpr):
    """Eight gates, eight rows that they multiply, and so on: a thread has both."""
    if len(gate.shape) == 1:
        both = gl.join(gate, up).reshape(4, 8, 2).permute(0, 2, 1).reshape(64)
    else:
        both = gl.join(gate, up).reshape(4, 8, 16, 2).permute(0, 3, 1, 2).reshape(64, 16)
    return gl.convert_layout(both, LAYOUT)


@gluon.jit
def _rows_of(shared, place, step, GATED: gl.constexpr, WHOLE: gl.constexpr, HALF: gl.constexpr):
    """64 rows, or 32 gates at ``place`` and as many others ``step`` parts behind them."""
    if GATED:
        parts = _parts(shared, 32)
        return _by_turns(parts.index(place).load(HALF), parts.index(place + step).load(HALF), WHOLE)
    else:
        return _parts(shared, 64).index(place).load(WHOLE)


@gluon.jit
def _read(
    words_shared, scale_shared, zero_shared, stage, block, GATED: gl.constexpr, ZEROS: gl.constexpr
):  # fmt: skip
    """Words [64, 16] of a block of rows, each where it is multiplied, with its zeros, if any, and scales."""
    WHOLE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    HALF: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, WHOLE)
    HALF_ROW: gl.constexpr = gl.SliceLayout(1, HALF)
    HALVES: gl.constexpr = 2 if GATED else 1
    BLOCKS: gl.constexpr = words_shared.shape[1] * HALVES // 64
    SCALES: gl.constexpr = scale_shared.shape[0] // words_shared.shape[0]
    words = _rows_of(words_shared, stage * HALVES * BLOCKS + block, BLOCKS, GATED, WHOLE, HALF)
    scales: tl.tuple = ()
    for group in gl.static_range(SCALES):
        place = (stage * SCALES + group) * HALVES * BLOCKS + block
        scales += (_rows_of(scale_shared, place, BLOCKS, GATED, ROW, HALF_ROW),)
    zeros: tl.tuple = ()
    if ZEROS:  # of gate and up each as many as of both
        place = stage * HALVES * HALVES * BLOCKS + block
        zeros += (_rows_of(zero_shared, place, 3 * BLOCKS, GATED, ROW, HALF_ROW),)
    return words, zeros, scales


@gluon.jit
def _widen_half(words, zeros, scales, UPPER: gl.constexpr, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [64, 16] as the first or the last 64 columns of the dequantized weight: [64, 64], to be multiplied."""
    LARGE: gl.constexpr = 128.0 if gl.bfloat16 == TYPE else 1024.0
    OF_BFLOAT16: gl.constexpr = UPPER_BFLOAT16 if UPPER else LOWER_BFLOAT16
    OF_FLOAT16: gl.constexpr = UPPER_FLOAT16 if UPPER else LOWER_FLOAT16
    CODE: gl.constexpr = OF_BFLOAT16 if gl.bfloat16 == TYPE else OF_FLOAT16
    if len(zeros) == 1:
        offset = _like(-LARGE - zeros[0].to(gl.float32), words, TYPE)
    else:
        offset = gl.full(words.shape, -8.0 - LARGE, TYPE, words.type.layout)
    codes = gl.inline_asm_elementwise(
        CODE, FOUR_WITH_OFFSET, [words, offset], is_pure=True, pack=2,
        dtype=(TYPE.value, TYPE.value, TYPE.value, TYPE.value),
    )  # fmt: skip
    numbers: tl.tuple = ()
    for index in gl.static_range(4):
        numbers += (_scale(codes[index], scales[(index + 4 * UPPER) * len(scales) // 8], TYPE),)
    return gl.convert_layout(_beside(numbers[0], numbers[1], numbers[2], numbers[3]), LAYOUT)


@gluon.jit
def _begin(weights, tokens, accs):
    """Products of a stage, which have not ended."""
    sums = ()
    for block in gl.static_range(len(accs)):
        sums += (hopper.warpgroup_mma(weights[block], tokens, accs[block], is_async=True),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _end(sums):
    """What they are when they have."""
    done = hopper.warpgroup_mma_wait(num_outstanding=0, deps=sums)
    if len(sums) == 1:
        return (done,)
    else:
        return done


@gluon.jit
def _store_rows(
    acc, bias_ptr, out_ptr, token, row, num_columns, num_tokens, GATED: gl.constexpr, BIASED: gl.constexpr
):  # fmt: skip
    """``acc`` [64, tokens], rows of weights from ``row`` on, into columns of out [T, num_columns]."""
    TOKENS: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = acc.reshape([4, 2, 8, TOKENS]).permute(0, 2, 3, 1).split()
        gate = gate.reshape([32, TOKENS])
        up = up.reshape([32, TOKENS])
        column = row + gl.arange(0, 32, layout=gl.SliceLayout(1, gate.type.layout))
        if BIASED:
            inside = column < num_columns
            gate += gl.load(bias_ptr + column, mask=inside, other=0.0).to(gl.float32)[:, None]
            up += gl.load(bias_ptr + num_columns + column, mask=inside, other=0.0).to(gl.float32)[:, None]
        gate = gate.to(dtype).to(gl.float32)
        result = activate_gate(gate, GATED).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
    else:
        result = acc
        column = row + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        if BIASED:
            result += gl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(gl.float32)[:, None]
    token = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, result.type.layout))
    mask = (token < num_tokens)[None, :] & (column < num_columns)[:, None]
    place = out_ptr + token.to(gl.int64)[None, :] * num_columns + column[:, None]
    gl.store(place, result.to(dtype), mask=mask)


@gluon.jit
def _widen_blocks(read, UPPER: gl.constexpr, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """A half of a step's columns, of each block of rows."""
    found = ()
    for block in gl.static_range(len(read)):
        words, zeros, scales = read[block]
        found += (_widen_half(words, zeros, scales, UPPER, TYPE, LAYOUT),)  # type: ignore[assignment]
    return found


@gluon.jit
def _read_blocks(
    words_shared, scale_shared, zero_shared, stage, FIRST: gl.constexpr, BLOCKS: gl.constexpr, GATED: gl.constexpr,
    ZEROS: gl.constexpr,
):  # fmt: skip
    found = ()
    for block in gl.static_range(BLOCKS):
        found += (_read(words_shared, scale_shared, zero_shared, stage, FIRST + block, GATED, ZEROS),)  # type: ignore[assignment]
    return found


@gluon.jit
def _multiply_words(
    GROUP: gl.constexpr, x_shared, words_shared, scale_shared, zero_shared, full, arrived, empty, bias_ptr, out_ptr,
    num_tiles, token_tiles, row_tiles, num_tokens, num_rows, part, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, SPLITS: gl.constexpr, BIASED: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: half of a tile's rows, in blocks of 64."""
    TYPE: gl.constexpr = x_shared.dtype
    TOKENS: gl.constexpr = x_shared.shape[1]
    BLOCKS: gl.constexpr = ROWS // 128
    HALVES: gl.constexpr = 2 if GATED else 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    stage = 0
    phase = 0
    before = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, row_tile, split = place_of(tile, token_tiles, row_tiles)
        accs = ()
        for _ in gl.static_range(BLOCKS):
            accs += (gl.full([64, TOKENS], 0.0, gl.float32, SUMS),)  # type: ignore[assignment]
        hopper.mbarrier.wait(arrived.index(stage), phase)
        read = _read_blocks(words_shared, scale_shared, zero_shared, stage, GROUP * BLOCKS, BLOCKS, GATED, ZEROS)
        lower = _widen_blocks(read, 0, TYPE, LAYOUT)
        hopper.mbarrier.wait(full.index(stage), phase)
        for step in range(part // 128):
            sums = _begin(lower, x_shared.index(2 * stage).permute((1, 0)), accs)
            upper = _widen_blocks(read, 1, TYPE, LAYOUT)
            # Behind the product of the step before. Without a branch here the product would end before the widening.
            if step > 0:
                hopper.mbarrier.arrive(empty.index(before))
            accs = _end(sums)
            sums = _begin(upper, x_shared.index(2 * stage + 1).permute((1, 0)), accs)
            before = stage
            stage, phase = next_of(stage, phase, STAGES)
            if step + 1 < part // 128:
                hopper.mbarrier.wait(arrived.index(stage), phase)
            # Behind the last step this is what was there before, and is not used.
            read = _read_blocks(words_shared, scale_shared, zero_shared, stage, GROUP * BLOCKS, BLOCKS, GATED, ZEROS)
            lower = _widen_blocks(read, 0, TYPE, LAYOUT)
            if step + 1 < part // 128:
                hopper.mbarrier.wait(full.index(stage), phase)
            accs = _end(sums)
        hopper.mbarrier.arrive(empty.index(before))
        out = out_ptr
        if SPLITS > 1:
            out += split * num_tokens.to(gl.int64) * num_rows
        for block in gl.static_range(BLOCKS):
            row = (row_tile * ROWS + (GROUP * BLOCKS + block) * 64) // HALVES
            _store_rows(
                accs[block], bias_ptr, out, token_tile * TOKENS, row, num_rows // HALVES, num_tokens, GATED, BIASED
            )  # fmt: skip


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
    WIDTH: gl.constexpr,
    ZEROS: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a multiplying thread
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    HALVES: gl.constexpr = 2 if GATED else 1
    PART: gl.constexpr = ROWS // HALVES
    SCALES: gl.constexpr = 128 // WIDTH if WIDTH % 128 else 1
    barriers: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    x_shared = gl.allocate_shared_memory(x.dtype, [STAGES * 2, x.block_shape[0], x.block_shape[1]], x.layout)
    words_shared = gl.allocate_shared_memory(words.dtype, [STAGES * HALVES, PART, 16], words.layout)
    scale_shared = gl.allocate_shared_memory(scale.dtype, [STAGES * SCALES * HALVES, PART], scale.layout)
    zero_shared = scale_shared
    if ZEROS:
        zero_shared = gl.allocate_shared_memory(zero.dtype, [STAGES * HALVES, ROWS], zero.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(arrived.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize([
        (_multiply_words, (
            0, x_shared, words_shared, scale_shared, zero_shared, full, arrived, empty, bias_ptr, out_ptr, num_tiles,
            token_tiles, row_tiles, num_tokens, num_rows, part, ROWS, STAGES, GATED, SPLITS, BIASED, ZEROS,
        )),
        (_multiply_words, (
            1, x_shared, words_shared, scale_shared, zero_shared, full, arrived, empty, bias_ptr, out_ptr, num_tiles,
            token_tiles, row_tiles, num_tokens, num_rows, part, ROWS, STAGES, GATED, SPLITS, BIASED, ZEROS,
        )),
        (load_all_words, (
            x, words, scale, zero, x_shared, words_shared, scale_shared, zero_shared, full, arrived, empty, num_tiles,
            token_tiles, row_tiles, num_rows, part, stride_group, STAGES, WIDTH, ZEROS, PDL,
        )),
    ], [4, 1], [REGISTERS, LOADING_REGISTERS])  # fmt: skip
