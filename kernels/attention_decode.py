"""Paged attention of rows with one query each: programs take the pieces a plan gives them, a second kernel merges.

All query heads of a KV head are packed into one tile (at least 16 rows, as the tensor cores need). See
:mod:`kernels.attention_plan` for who computes what.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_plan import DecodePlan
from kernels.float8 import float8_query, unpack_pairs
from kernels.merge_pieces import merge_pieces
from kernels.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.target import target_of
from kernels.triton_import import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch shape of the decode kernel. tile: tokens per step; programs: per KV head."""

    tile: int
    programs: int
    num_warps: int
    num_stages: int


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a small number for a CPU (the interpreter)."""
    target = target_of(device)
    return target.num_multiprocessors if target is not None else 4


def decode_config(
    kv_heads: int, head_dim: int, element_size: int, processors: int, *, float8: bool = False
) -> DecodeConfig:
    """The launch shape; element_size in bytes, of queries. As many programs as the device holds at once."""
    padded = next_power_of_2(head_dim)
    if element_size > 2:
        return DecodeConfig(tile=16, programs=max(1, 2 * processors // kv_heads), num_warps=8, num_stages=1)
    if padded > 128:
        return DecodeConfig(tile=32, programs=max(1, 2 * processors // kv_heads), num_warps=4, num_stages=3)
    return DecodeConfig(
        tile=64, programs=max(1, 4 * processors // kv_heads), num_warps=4, num_stages=3 if float8 else 2
    )


def merge_shape(plan: DecodePlan) -> tuple[int, int]:
    """(pieces per step, warps) of the merge: few rows have many pieces each, of many rows each has few."""
    return (64, 4) if plan.num_rows < 4 else (8, 1)


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [I, Hq, D] float32: normalised results of items
    lse_ptr,  # [I, Hq] float32: log2 of their sums of exponentials
    items_ptr,  # [I, 8]
    program_items_ptr,  # [P + 1]
    tables_ptr,  # [S, MB]
    scales_ptr,  # [2, Hkv] float32: what a float8 cache's keys and values are to be multiplied with; else None
    scale_log2,
    window,
    stride_qt,
    stride_qh,
    stride_block,
    stride_token,
    stride_head,
    stride_ot,
    stride_oh,
    stride_table,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    SETTLED: tl.constexpr,  # the plan may be read before waiting
    PDL: tl.constexpr,
):
    # A float8 cache's values are read two at a time, as numbers of 16 bits: tensor cores want them transposed, which
    # loads do for 16 bits only. Even and odd columns of the result are then summed up apart.
    PAIRS: tl.constexpr = scales_ptr is not None
    STEP: tl.constexpr = 2 if PAIRS else 1
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    if PDL and not SETTLED:
        gdc_wait()
    member = tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + member
    mask_heads = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    k_base = k_ptr + kv_head * stride_head + dim[None, :]
    column = tl.arange(0, BLOCK_DIM // STEP)
    v_scale = 1.0
    if PAIRS:
        scale_log2 *= tl.load(scales_ptr + kv_head)
        v_scale = tl.load(scales_ptr + tl.num_programs(0) + kv_head)
        v_base = v_ptr.to(tl.pointer_type(tl.int16)) + kv_head * (stride_head // 2) + column[None, :]
    else:
        v_base = v_ptr + kv_head * stride_head + column[None, :]
    mask_columns = column < HEAD_DIM // STEP
    mask_out = (member < GROUP)[:, None] & mask_columns[None, :]
    item = tl.load(program_items_ptr + program)
    end_item = tl.load(program_items_ptr + program + 1)
    fields = items_ptr + item * 8
    live = item < end_item
    row = tl.load(fields, mask=live, other=0).to(tl.int64)
    slot = tl.load(fields + 1, mask=live, other=0).to(tl.int64)
    length = tl.load(fields + 2, mask=live, other=0)
    tile_begin = tl.load(fields + 3, mask=live, other=0)
    tile_end = tl.load(fields + 4, mask=live, other=0)
    divided = tl.load(fields + 5, mask=live, other=0)
    table = tables_ptr + slot * stride_table
    place = tile_begin * TILE + tl.arange(0, TILE)
    next_block = tl.load(table + place // BLOCK_SIZE, mask=place < length, other=0)
    if PDL:
        gdc_launch_dependents()
        if SETTLED:
            gdc_wait()
    while item < end_item:
        # The next item's numbers are asked for before this one's tiles, its first blocks before this one's result.
        fields = items_ptr + (item + 1) * 8
        live = item + 1 < end_item
        next_row = tl.load(fields, mask=live, other=0).to(tl.int64)
        next_slot = tl.load(fields + 1, mask=live, other=0).to(tl.int64)
        next_length = tl.load(fields + 2, mask=live, other=0)
        next_begin = tl.load(fields + 3, mask=live, other=0)
        next_end = tl.load(fields + 4, mask=live, other=0)
        next_divided = tl.load(fields + 5, mask=live, other=0)
        first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        q = tl.load(q_ptr + row * stride_qt + head[:, None] * stride_qh + dim[None, :], mask=mask_heads, other=0.0)
        if PAIRS:
            q = float8_query(q)
        highest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        acc = tl.zeros([BLOCK_HEADS, BLOCK_DIM // STEP], tl.float32)
        acc_odd = tl.zeros([BLOCK_HEADS, BLOCK_DIM // STEP], tl.float32)
        for tile in tl.range(tile_begin, tile_end):
            place = tile * TILE + tl.arange(0, TILE)
            seen = (place < length) & (place >= first)
            block = tl.maximum(next_block, 0).to(tl.int64)[:, None]
            after = place + TILE
            next_block = tl.load(table + after // BLOCK_SIZE, mask=after < length, other=0)
            offset = (place % BLOCK_SIZE)[:, None]
            mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
            where = block * stride_block + offset * stride_token
            k = tl.load(k_base + where, mask=mask, other=0.0)
            where = block * (stride_block // STEP) + offset * (stride_token // STEP)
            v = tl.load(v_base + where, mask=seen[:, None] & mask_columns[None, :], other=0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
            decay = tl.exp2(highest - new_highest)
            total = total * decay + tl.sum(weights, axis=1)
            weights = weights.to(q.dtype)
            if PAIRS:
                v, odd = unpack_pairs(v, v_ptr.dtype.element_ty)
                acc_odd = tl.dot(weights, odd.to(q.dtype), acc_odd * decay[:, None], input_precision=PRECISION)
            acc = tl.dot(weights, v.to(q.dtype), acc * decay[:, None], input_precision=PRECISION)
            highest = new_highest

        table = tables_ptr + next_slot * stride_table
        place = next_begin * TILE + tl.arange(0, TILE)
        next_block = tl.load(table + place // BLOCK_SIZE, mask=place < next_length, other=0)
        share = (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        if divided == 0:
            out = out_ptr + row * stride_ot + head[:, None] * stride_oh + column[None, :] * STEP
            tl.store(out, (acc * share).to(out_ptr.dtype.element_ty), mask=mask_out)
            if PAIRS:
                tl.store(out + 1, (acc_odd * share).to(out_ptr.dtype.element_ty), mask=mask_out)
        else:
            part = item * num_heads + head
            partial = partial_ptr + part[:, None] * HEAD_DIM + column[None, :] * STEP
            tl.store(partial, acc * share, mask=mask_out)
            if PAIRS:
                tl.store(partial + 1, acc_odd * share, mask=mask_out)
            tl.store(lse_ptr + part, highest + tl.log2(total), mask=member < GROUP)
        item += 1
        row, length, divided, tile_begin, tile_end = next_row, next_length, next_divided, next_begin, next_end


@triton.jit
def _merge_kernel(
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [I, Hq, D] float32
    lse_ptr,  # [I, Hq] float32
    merges_ptr,  # [M, 4]
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One divided row and head: the sum of its pieces, each weighted by its share of the exponentials."""
    if PDL:
        gdc_launch_dependents()
        if not SETTLED:
            gdc_wait()
    head = tl.program_id(0)
    fields = merges_ptr + tl.program_id(1) * 4
    row = tl.load(fields).to(tl.int64)
    first = tl.load(fields + 1)
    count = tl.load(fields + 2)
    if PDL and SETTLED:
        gdc_wait()
    if count == 0:
        return
    dim = tl.arange(0, BLOCK_DIM)
    num_heads = tl.num_programs(0)
    merged = merge_pieces(
        partial_ptr, lse_ptr, first * num_heads + head, count, num_heads, HEAD_DIM, BLOCK_PIECES, BLOCK_DIM
    )
    out = out_ptr + row * stride_ot + head * stride_oh + dim
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    sliding_window: int,
    plan: DecodePlan,
    config: DecodeConfig | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """out[:R] = attention of q[:R], one token for each of the plan's R rows; shapes as in `paged_attention`."""
    q_heads, head_dim = q.shape[1], q.shape[2]
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q_heads // kv_heads
    config = config or decode_config(
        kv_heads, head_dim, q.element_size(), num_multiprocessors(q.device), float8=kv_scales is not None
    )
    assert config.tile == plan.tile
    common = {"HEAD_DIM": head_dim, "BLOCK_DIM": next_power_of_2(head_dim), "SETTLED": plan.settled, **pdl(q.device)}
    _decode_kernel[(kv_heads, plan.num_programs)](
        q, k_cache, v_cache, out, plan.partial, plan.lse, plan.items, plan.program_items, block_tables,
        kv_scales, scale * LOG2_E, sliding_window,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], out.stride(0), out.stride(1), block_tables.stride(0),
        GROUP=group, BLOCK_SIZE=block_size, TILE=config.tile, BLOCK_HEADS=max(16, next_power_of_2(group)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **common,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    block_pieces, warps = merge_shape(plan)
    _merge_kernel[(q_heads, len(plan.merges))](
        out, plan.partial, plan.lse, plan.merges, out.stride(0), out.stride(1),
        BLOCK_PIECES=block_pieces, **common, num_warps=warps,
    )  # fmt: skip
