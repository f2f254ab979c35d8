"""Products of few pairs of a token and an expert with words of eight 4-bit codes, for Hopper.

Each pair is an item of its own, as in `pagebus.kernels.moe.coded`, whose tiles of 16 rows come through a ring as those
of `pagebus.kernels.specialized.hopper_ring`. A program has neighbouring tiles, mostly of one pair, whose token's inputs
stay in registers. Which experts are needed is not known before the kernels before this one have ended.
"""

from __future__ import annotations

import torch

from pagebus.kernels.coded.weights import WORD_TILE, Code, Coded
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl, gluon, hopper, tl
from pagebus.kernels.moe.activation import SILU, SWIGLU_CLAMPED, Gate
from pagebus.kernels.specialized.hopper_few import (
    LOADING_REGISTERS,
    MOST_STAGES,
    REGISTERS,
    SHARED_BYTES,
    FewConfig,
    by_tiles,
)
from pagebus.kernels.specialized.hopper_fragments import WARPS
from pagebus.kernels.specialized.hopper_gemm import activate_gate
from pagebus.kernels.specialized.hopper_ring import ROWS, add_bias, apart, read_tokens, ring_barriers, tile_sum
from pagebus.kernels.specialized.hopper_word_loads import next_of


@gluon.jit
def _tiles_of(experts_ptr, item, tiles, begin, end):
    """The expert of an item, and which of its tiles this program has: none without an expert."""
    expert = gl.load(experts_ptr + item)
    low, high = gl.maximum(begin - item * tiles, 0), gl.minimum(end - item * tiles, tiles)
    if expert < 0:
        high = low
    return expert, low, high


@gluon.jit
def _own(count, tiles):
    """All tiles of this program, numbered through items, and its first and its last item."""
    total = count * tiles
    begin = (gl.program_id(0).to(gl.int64) * total // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1).to(gl.int64) * total // gl.num_programs(0)).to(gl.int32)
    return begin, end, begin // tiles, (end - 1) // tiles


@gluon.jit
def _fill(
    words, scale, zero, words_shared, scale_shared, zero_shared, full, empty, experts_ptr, count, tiles, num_columns,
    num_rows, STEPS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    GROUPS: gl.constexpr = scale.block_shape[1] // WARPS
    SCALE_BYTES: gl.constexpr = GROUPS * (scale.dtype.primitive_bitwidth // 8 + ZEROS)
    HALVES: gl.constexpr = 2 if GATED else 1
    begin, end, first, last = _own(count, tiles)
    stage = 0
    phase = 1  # what was never filled counts as empty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for item in range(first, last + 1):
        expert, low, high = _tiles_of(experts_ptr, item, tiles, begin, end)
        for tile in range(low, high):
            for half in gl.static_range(HALVES):
                row = half * num_columns + tile * ROWS
                hopper.mbarrier.wait(empty.index(stage), phase)
                arrived = full.index(stage)
                hopper.mbarrier.expect(arrived, STEPS * WARPS * ROWS * (64 + SCALE_BYTES))
                for step in gl.static_range(STEPS):
                    at, column = stage * STEPS + step, step * WARPS
                    hopper.tma.async_copy_global_to_shared(
                        words, [column, expert * num_rows + row, 0], arrived, words_shared.index(at)
                    )  # fmt: skip
                    hopper.tma.async_copy_global_to_shared(
                        scale, [expert, column * GROUPS, row], arrived, scale_shared.index(at)
                    )  # fmt: skip
                    if ZEROS:
                        hopper.tma.async_copy_global_to_shared(
                            zero, [expert, column * GROUPS, row], arrived, zero_shared.index(at)
                        )  # fmt: skip
                stage, phase = next_of(stage, phase, STAGES)


@gluon.jit
def _gate(gate, up, alpha, limit, KIND: gl.constexpr, dtype: gl.constexpr):
    """As `pagebus.kernels.moe.activation.gate_tile`."""
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    if KIND != SWIGLU_CLAMPED:
        return activate_gate(gate, 1 if KIND == SILU else 2).to(dtype).to(gl.float32) * up
    else:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))


@gluon.jit
def _multiply(
    x_ptr, bias_ptr, out_ptr, words_shared, scale_shared, zero_shared, full, empty, experts_ptr, count, tiles,
    num_columns, num_rows, stride_x, size, alpha, limit, CODE: gl.constexpr, STEPS: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, BIASED: gl.constexpr, ZEROS: gl.constexpr,
    TOP_K: gl.constexpr, EVEN_K: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply."""
    TYPE: gl.constexpr = x_ptr.dtype.element_ty
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.SliceLayout(0, apart())
    HALVES: gl.constexpr = 2 if GATED else 1
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    begin, end, first, last = _own(count, tiles)
    stage = 0
    phase = 0
    if PDL:
        gdc_wait()
    for item in range(first, last + 1):
        expert, low, high = _tiles_of(experts_ptr, item, tiles, begin, end)
        source = item // TOP_K if GATED else item
        x, sums = read_tokens(x_ptr + source * stride_x, 0, 1, size, 0, CODE, 8, STEPS, EVEN_K, LAYOUT)
        for tile in range(low, high):
            totals: tl.tuple = ()
            row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
            for half in gl.static_range(HALVES):
                total = tile_sum(
                    x, sums, words_shared, scale_shared, zero_shared, full, empty, stage, phase, CODE, TYPE, ZEROS,
                    LAYOUT,
                )  # fmt: skip
                totals += (add_bias(total, bias_ptr + expert * num_rows + half * num_columns, row, BIASED),)
                stage, phase = next_of(stage, phase, STAGES)
            whole = totals[0]
            if GATED:
                whole = _gate(totals[0], totals[1], alpha, limit, KIND, dtype)
            token = gl.arange(0, 8, layout=gl.SliceLayout(0, TILE))  # all the same
            places = out_ptr + item * num_columns + row[:, None] + token[None, :]
            gl.store(places, whole.to(dtype), mask=(token == 0)[None, :] & (row >= 0)[:, None])


@gluon.jit(do_not_specialize=["count"])
def pairs_kernel(
    x_ptr,  # [T, K] if GATED, else [P, K]
    words,  # descriptor of [K / 128, E * N, 16], N = 2I if GATED
    scale,  # descriptor of [E, groups, N]
    zero,  # the same of zeros, if ZEROS
    bias_ptr,  # [E, N] if BIASED
    out_ptr,  # [P, I] if GATED, else [P, N]
    experts_ptr,  # [P]; -1: none
    count,  # P
    tiles,  # of an item
    num_columns,  # of out
    num_rows,  # N
    stride_x,
    size,  # K
    alpha,
    limit,
    CODE: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    KIND: gl.constexpr,
    BIASED: gl.constexpr,
    ZEROS: gl.constexpr,
    TOP_K: gl.constexpr,
    EVEN_K: gl.constexpr,  # all columns of all steps exist
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    GROUPS: gl.constexpr = scale.block_shape[1]
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, scale.dtype.primitive_bitwidth, 2)
    words_shared = gl.allocate_shared_memory(words.dtype, [STAGES * STEPS, WARPS, ROWS, 16], words.layout)
    scale_shared = gl.allocate_shared_memory(scale.dtype, [STAGES * STEPS, 1, GROUPS, ROWS], scale.layout)
    scales = scale_shared._reinterpret(scale.dtype, [STAGES * STEPS, GROUPS, ROWS], FLAT)
    zero_shared = scale_shared
    zeros = scales
    if ZEROS:
        zero_shared = gl.allocate_shared_memory(zero.dtype, [STAGES * STEPS, 1, GROUPS, ROWS], zero.layout)
        zeros = zero_shared._reinterpret(zero.dtype, [STAGES * STEPS, GROUPS, ROWS], gl.NVMMASharedLayout(0, 8, 2))
    full, empty = ring_barriers(STAGES)
    gl.warp_specialize([
        (_multiply, (
            x_ptr, bias_ptr, out_ptr, words_shared, scales, zeros, full, empty, experts_ptr, count, tiles, num_columns,
            num_rows, stride_x, size, alpha, limit, CODE, STEPS, STAGES, GATED, KIND, BIASED, ZEROS, TOP_K, EVEN_K, PDL,
        )),
        (_fill, (
            words, scale, zero, words_shared, scale_shared, zero_shared, full, empty, experts_ptr, count, tiles,
            num_columns, num_rows, STEPS, STAGES, GATED, ZEROS, PDL,
        )),
    ], [1], [LOADING_REGISTERS])  # fmt: skip


def reads_pairs(weight: Coded) -> bool:
    """Whether the kernel reads experts like this: whole numbers in groups of 128, or E2M1 with exponents of 32."""
    exact = weight.low is None and weight.whole is None and weight.row_stride == 1 and weight.height == 1
    whole = weight.code == Code.WORDS and weight.width == WORD_TILE and weight.scale.dtype == torch.float32
    return exact and (whole or (weight.code == Code.E2M1 and weight.width == 32 and weight.scale.dtype == torch.uint8))


def ring_pairs(
    x: torch.Tensor, weight: Coded, bias: torch.Tensor | None, out: torch.Tensor, experts: torch.Tensor, gate: Gate,
    config: FewConfig, *, gated: bool,
) -> torch.Tensor:  # fmt: skip
    """x [T, K], or [P, K] if not ``gated``, times the matrices [E, N, K] of ``experts`` [T, k] -> out [P, N]. If
    ``gated``, what becomes of gate and up [P, N / 2]. Rows are a multiple of 16, or of 32 then."""
    size, num_rows, zeros = weight.inputs, weight.rows, weight.zero is not None
    num_columns = num_rows // 2 if gated else num_rows
    tiles, target = num_columns // ROWS.value, target_of(x.device)
    groups = WARPS.value * WORD_TILE // weight.width
    assert config.passes == 1
    assert config.fits(size)
    assert reads_pairs(weight)
    assert num_columns % ROWS.value == 0
    assert target is not None
    stage = config.steps * ROWS.value * (64 * WARPS.value + groups * (weight.scale.itemsize + zeros))
    scale = _of_groups(weight.scale, groups)
    zero = scale if weight.zero is None else _of_groups(weight.zero, groups)
    pairs_kernel[(min(experts.numel() * tiles, target.num_multiprocessors),)](
        x, by_tiles(weight.numbers.flatten(0, 1)), scale, zero,
        out if bias is None else bias, out, experts, experts.numel(), tiles, num_columns, num_rows, x.stride(0), size,
        gate.alpha, gate.limit, CODE=int(weight.code), STEPS=config.steps,
        STAGES=min(MOST_STAGES, SHARED_BYTES // stage), GATED=gated, KIND=str(gate.kind), BIASED=bias is not None,
        ZEROS=zeros, TOP_K=experts.shape[1], EVEN_K=size == config.steps * WARPS.value * WORD_TILE,
        LOADING_REGISTERS=LOADING_REGISTERS, num_warps=WARPS.value, maxnreg=REGISTERS, **pdl(x.device),
    )  # fmt: skip
    return out


def _of_groups(values: torch.Tensor, groups: int) -> object:
    """A descriptor of scales, or zeros, [E, groups, N]."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * values.itemsize, rank=3)
    return LayoutDescriptor.from_tensor(values, [1, groups, ROWS.value], layout)
