"""Products of many sorted pairs with their experts' weights, for Hopper: one warp loads, two warpgroups multiply.

A tile is an item's pairs by rows of its expert's weights, in a ring of stages as in `hopper_gemm`. The tensor memory
accelerator reads rows that lie behind each other, so tokens are first copied into the order of their pairs.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl, gluon, hopper, next_power_of_2, tl, triton
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.grouped import combine
from pagebus.kernels.moe.sorting import SortedPairs
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.specialized.hopper_gemm import (
    DEPTH,
    GROUPS,
    LOADING_REGISTERS,
    TOKENS,
    SpecializedConfig,
    activate_gate,
    copy_box,
    rows_of,
    zeros_of,
)

GATHERED = 8
"""Pairs of a program that copies tokens."""
GATE_NUMBERS = {GateKind.SILU: 1, GateKind.GELU_TANH: 2, GateKind.SWIGLU_CLAMPED: 3}


@triton.jit
def _gather_kernel(
    x_ptr,  # [T, K]
    order_ptr,  # [P]
    out_ptr,  # [P, K]
    stride_x,
    num_pairs,
    SIZE: tl.constexpr,  # K
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    place = tl.program_id(0) // BLOCKS * PAIRS + tl.arange(0, PAIRS)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.load(order_ptr + place, mask=place < num_pairs, other=0)
    # What has no expert has no place in the order, which holds anything there.
    token = tl.minimum(tl.maximum(pair, 0), num_pairs - 1) // TOP_K
    mask = (place < num_pairs)[:, None] & (column < SIZE)[None, :]
    source = x_ptr + token.to(tl.int64)[:, None] * stride_x + column[None, :]
    target = out_ptr + place.to(tl.int64)[:, None] * SIZE + column[None, :]
    # Each expert's pairs read the tokens again, so these shall stay in the L2 cache, which many copies overflow.
    x = tl.load(source, mask=mask, eviction_policy="evict_last")
    tl.store(target, x, mask=mask, eviction_policy="evict_first")


def gather_pairs(x: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """x [T, K] and the pairs' ``order`` [P] -> the tokens of all pairs [P, K]."""
    num_pairs, size = len(order), x.shape[1]
    assert x.stride(1) == 1
    assert order.is_contiguous()
    out = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    block = min(1024, next_power_of_2(size))
    _gather_kernel[(-(-num_pairs // GATHERED) * -(-size // block),)](
        x, order, out, x.stride(0), num_pairs, SIZE=size, TOP_K=top_k, PAIRS=GATHERED, BLOCK=block, num_warps=4,
        **pdl(x.device),
    )  # fmt: skip
    return out


@gluon.jit
def _load_tiles(
    x, weight, x_shared, w_shared, full, empty, items_ptr, total, row_tiles, num_columns, size, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: an item's tokens and its expert's weights, gate and up under each other."""
    WIDTH: gl.constexpr = weight.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    BYTES: gl.constexpr = 2 * DEPTH * (HALVES * WIDTH + x.block_shape[0])
    stage = 0
    phase = 1  # what was never filled counts as empty
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        item = items_ptr + tile // row_tiles * 4
        first = gl.load(item + 1)
        row = gl.load(item) * HALVES * num_columns + tile % row_tiles * WIDTH
        for k in range(0, size, DEPTH):
            hopper.mbarrier.wait(empty.index(stage), phase)
            hopper.mbarrier.expect(full.index(stage), BYTES)
            for half in gl.static_range(HALVES):
                shared = w_shared.index(HALVES * stage + half)
                copy_box(weight, row + half * num_columns, k, full.index(stage), shared)
            copy_box(x, first, k, full.index(stage), x_shared.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _gate(gate, up, alpha, limit, GATE: gl.constexpr, dtype: gl.constexpr):
    """`gate_tile`, by the number of its kind."""
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    if GATE == 3:
        gate, up = gl.minimum(gate, limit), gl.minimum(gl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    return activate_gate(gate, GATE).to(dtype).to(gl.float32) * up


@gluon.jit
def _bias(bias_ptr, column, num_columns):
    return gl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _store_tile(
    acc, bias_ptr, out_ptr, order_ptr, expert, first, place, count, column, num_columns, alpha, limit,
    HALVES: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Places of an item from ``place`` on. Gated ones lie sorted, others where their pair's number says."""
    if HALVES == 2:
        gate, up = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
        column = column + gl.arange(0, gate.shape[1], layout=gl.SliceLayout(0, gate.type.layout))
        if bias_ptr is not None:
            gate += _bias(bias_ptr + expert * 2 * num_columns, column, num_columns)
            up += _bias(bias_ptr + expert * 2 * num_columns + num_columns, column, num_columns)
        result = _gate(gate, up, alpha, limit, GATE, out_ptr.dtype.element_ty)
    else:
        column = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        result = acc
        if bias_ptr is not None:
            result += _bias(bias_ptr + expert * num_columns, column, num_columns)
    place = place + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, result.type.layout))
    present = place < count
    target = first + place
    if HALVES == 1:
        target = gl.load(order_ptr + target, mask=present, other=0)
    places = out_ptr + target.to(gl.int64)[:, None] * num_columns + column[None, :]
    gl.store(places, result.to(out_ptr.dtype.element_ty), mask=present[:, None] & (column < num_columns)[None, :])


@gluon.jit
def _multiply_tiles(
    GROUP: gl.constexpr, x_shared, w_shared, full, empty, bias_ptr, out_ptr, order_ptr, items_ptr, total, row_tiles,
    num_columns, size, alpha, limit, HALVES: gl.constexpr, GATE: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: the pairs of ``GROUP`` of each tile."""
    PAIRS: gl.constexpr = x_shared.shape[1]
    DEPTH: gl.constexpr = x_shared.shape[2]
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        item = items_ptr + tile // row_tiles * 4
        expert, first, count = gl.load(item), gl.load(item + 1), gl.load(item + 2)
        acc = zeros_of(x_shared.index(0), rows_of(w_shared, 0, STAGES))
        for k in range(0, size, DEPTH):
            hopper.mbarrier.wait(full.index(stage), phase)
            left = x_shared.index(stage * GROUPS + GROUP)
            acc = hopper.warpgroup_mma(left, rows_of(w_shared, stage, STAGES), acc, is_async=True)
            # One product stays in flight, so that the next is there when it ends.
            acc = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            hopper.mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=k > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        hopper.mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES))
        column = tile % row_tiles * w_shared.shape[1]
        _store_tile(
            acc, bias_ptr, out_ptr, order_ptr, expert, first, GROUP * PAIRS, count, column, num_columns, alpha, limit,
            HALVES, GATE,
        )  # fmt: skip


@gluon.jit
def _experts_kernel(
    x,  # descriptor of [P, K], sorted
    weight,  # descriptor of [E * N, K], N = 2I if HALVES is 2
    bias_ptr,  # [E, N] or None
    out_ptr,  # [P, I], sorted, or [P, N] by the pairs' numbers
    order_ptr,  # [P]
    items_ptr,  # [I, 4]
    num_items_ptr,  # [1]
    row_tiles,
    num_columns,  # I or N
    size,  # K
    alpha,
    limit,
    HALVES: gl.constexpr,
    GATE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a multiplying thread
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    PAIRS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    x_shared = gl.allocate_shared_memory(x.dtype, [STAGES, PAIRS, DEPTH], x.layout)
    x_groups = x_shared._reinterpret(x.dtype, [STAGES * GROUPS, PAIRS // GROUPS, DEPTH], x.layout)
    w_shared = gl.allocate_shared_memory(
        weight.dtype, [STAGES * HALVES, weight.block_shape[0], DEPTH], weight.layout
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=GROUPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = gl.load(num_items_ptr) * row_tiles
    gl.warp_specialize([
        (_multiply_tiles, (
            0, x_groups, w_shared, full, empty, bias_ptr, out_ptr, order_ptr, items_ptr, total, row_tiles, num_columns,
            size, alpha, limit, HALVES, GATE, STAGES, GROUPS,
        )),
        (_multiply_tiles, (
            1, x_groups, w_shared, full, empty, bias_ptr, out_ptr, order_ptr, items_ptr, total, row_tiles, num_columns,
            size, alpha, limit, HALVES, GATE, STAGES, GROUPS,
        )),
        (_load_tiles, (
            x, weight, x_shared, w_shared, full, empty, items_ptr, total, row_tiles, num_columns, size, HALVES, STAGES,
        )),
    ], [4, 1], [REGISTERS, LOADING_REGISTERS])  # fmt: skip


def specialized_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, pairs: SortedPairs,
    config: SpecializedConfig, gate: Gate | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [P, K], sorted, times weight [E, N, K] of each pair's expert, plus its bias [E, N]. With ``gate`` its results
    go into out [P, N / 2], sorted, and otherwise sums into out [P, N], by the pairs' numbers.

    Items are of `TOKENS` pairs; K is a multiple of `DEPTH`.
    """
    (_, num_rows, size), halves = weight.shape, 2 if gate else 1
    assert pairs.tokens == TOKENS
    assert size % DEPTH == 0
    assert x.is_contiguous()
    assert weight.is_contiguous()
    how, columns, width = gate or Gate(), num_rows // halves, config.rows // halves
    row_tiles = -(-columns // width)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    target = target_of(x.device)
    assert target is not None
    _experts_kernel[(min(len(pairs.items) * row_tiles, target.num_multiprocessors),)](
        LayoutDescriptor.from_tensor(x, [TOKENS, DEPTH], layout),
        LayoutDescriptor.from_tensor(weight.view(-1, size), [width, DEPTH], layout),
        bias,
        out,
        pairs.order,
        pairs.items,
        pairs.num_items,
        row_tiles,
        columns,
        size,
        how.alpha,
        how.limit,
        HALVES=halves,
        GATE=GATE_NUMBERS[how.kind],
        STAGES=config.stages(size),
        GROUPS=GROUPS,
        REGISTERS=config.registers,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=config.launch_registers,
        **pdl(x.device),
    )
    return out


def specialized_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights, pairs: SortedPairs,
    gate_up: SpecializedConfig, down: SpecializedConfig,
) -> torch.Tensor:  # fmt: skip
    """`pagebus.kernels.moe.experts.moe_experts` of tokens whose ``pairs`` are sorted."""
    (num_tokens, top_k), (_, num_rows, width) = experts.shape, layer.down.shape
    gathered = gather_pairs(x, pairs.order, top_k)
    hidden = torch.empty((experts.numel(), width), dtype=x.dtype, device=x.device)
    products = torch.empty((experts.numel(), num_rows), dtype=x.dtype, device=x.device)
    specialized_product(gathered, layer.gate_up, layer.gate_up_bias, hidden, pairs, gate_up, layer.gate)
    specialized_product(hidden, layer.down, layer.down_bias, products, pairs, down)
    return combine(products.view(num_tokens, top_k, num_rows), weights, experts)
