"""Paged attention of rows with several queries each. Programs compute spans that the host has cut: one program per head
or, for few queries, per KV head.

A span is a block of queries with all its keys, or with a piece of them (:mod:`pagebus.kernels.attention.prefill_plan`);
a second kernel merges pieces. Tiles of keys after the block's last query or before its sliding window are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagebus.kernels.attention.merge import cap_scores, merge_pieces, sink_share
from pagebus.kernels.attention.prefill_plan import PrefillConfig
from pagebus.kernels.common.float8 import float8_query, has_instructions
from pagebus.kernels.common.int8 import ONES, token_scales, unpack
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.reach import first_seen
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634
MERGE_GROUPS = 16
"""Programs that share the queries of one block and head among them when its pieces are merged."""
MOST_SPANS = 32768
"""Of one launch: the second dimension of a grid has room for 65,535."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What all layers of a pass share about its prompts.

    ``spans`` [N, 5] and ``merges`` [M, 4] int32 on the device: see `QuerySpans`; rows below 0 and merges of 0 pieces
    fill them up. ``partial`` [P, block_queries, Hq, D] and ``lse`` [P, block_queries, Hq] float32 hold results of
    pieces between the two kernels of one layer; none where no block is ever cut.
    """

    config: PrefillConfig
    spans: torch.Tensor
    merges: torch.Tensor
    partial: torch.Tensor | None
    lse: torch.Tensor | None


def plan_prefills(
    spans: torch.Tensor, merges: torch.Tensor, config: PrefillConfig, q_heads: int, head_dim: int, pieces: int
) -> PrefillPlan:
    """A plan with room for this many ``pieces``."""
    if not pieces:
        return PrefillPlan(config, spans, merges, None, None)
    shape = pieces, config.block_queries, q_heads
    floats: dict[str, Any] = {"dtype": torch.float32, "device": spans.device}
    return PrefillPlan(config, spans, merges, torch.empty((*shape, head_dim), **floats), torch.empty(shape, **floats))


@triton.jit
def _attend(
    acc, total, highest, q, k_base, v_base, words_base, table, position, oldest, seen_from, begin, end, length,
    scale_log2, stride_block, stride_token,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_DIM: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Take the keys begin..end (a multiple of TILE apart) into the running softmax of one block of queries.

    words_base: a cache in int8 has its scales there, others have None. seen_from: what lies before it, behind the
    window of all queries, is not read: its blocks may be another sequence's by now.
    """
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    place = begin + tl.arange(0, TILE)
    next_block = tl.load(table + place // BLOCK_SIZE, mask=place < length, other=0)
    for start in tl.range(begin, end, TILE):
        # Block ids are loaded a tile ahead: loads that wait for loads would take a stage of the pipeline.
        place = start + tl.arange(0, TILE)
        # Division without a sign takes fewer instructions, but where tiles fill the registers more of these.
        unsigned = place.to(tl.uint32) if TILE <= 64 else place
        block_ids = tl.maximum(next_block, 0).to(tl.int64)
        after = place + TILE
        next_block = tl.load(table + (unsigned + TILE) // BLOCK_SIZE, mask=after < length, other=0)
        there = place < length
        if WINDOW:
            there &= place >= seen_from
        mask = there[:, None] & (dim < HEAD_DIM) if MASKED else dim < HEAD_DIM
        offset = (unsigned % BLOCK_SIZE)[:, None]
        where = block_ids[:, None] * stride_block + offset * stride_token
        k_tile = k_base + where
        v_tile = v_base + where
        if MASKED or HEAD_DIM != BLOCK_DIM:
            k = tl.load(k_tile, mask=mask, other=0.0)
            v = tl.load(v_tile, mask=mask, other=0.0)
        else:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        if words_base is None:
            k = k.to(q.dtype)
        else:
            words = words_base + block_ids * (stride_block // 4) + unsigned % BLOCK_SIZE
            words = tl.load(words, mask=there, other=ONES) if MASKED else tl.load(words)
            k_scale, v_log, per_v_scale = token_scales(words, NATIVE and q.dtype != tl.float32)
            k = unpack(k, 0, q.dtype, NATIVE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor = scale_log2
        if SOFTCAP > 0:
            if words_base is None:
                scores, factor = cap_scores(scores * scale_log2, SOFTCAP), 1.0
            else:
                scores = cap_scores(scores * (k_scale * scale_log2)[None, :], SOFTCAP)
                scores, factor = scores + v_log[None, :], 1.0
        elif words_base is not None:
            scores, factor = tl.fma(scores, (k_scale * scale_log2)[None, :], v_log[None, :]), 1.0
        if MASKED:
            seen = place[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (place[None, :] >= oldest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        base = new_highest
        if MASKED:  # a query may have seen nothing yet
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * factor - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights if words_base is None else weights * per_v_scale[None, :], axis=1)
        v = v.to(q.dtype) if words_base is None else unpack(v, -128, q.dtype, NATIVE)
        acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        highest = new_highest
    return acc, total, highest


@triton.jit(do_not_specialize=["slots_ptr", "query_start_ptr", "lens_ptr", "spans_ptr", "window"])
def _prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [P, BLOCK_QUERIES, Hq, D] float32: normalised results of pieces; None: there are none
    lse_ptr,  # [P, BLOCK_QUERIES, Hq] float32: log2 of their sums of exponentials
    slots_ptr,  # [R]
    query_start_ptr,  # [R + 1]
    lens_ptr,  # [R]
    tables_ptr,  # [S, MB]
    spans_ptr,  # [N, 5] int32: row (negative: none), first query, first key, end of keys, piece (negative: the block)
    scales_ptr,  # [2, Hkv] float32: what a float8 cache's keys and values are to be multiplied with; or, in int8,
    # [num_blocks, Hkv, BLOCK_SIZE, 2] bfloat16, with a block's stride; else None
    sinks_ptr,  # [Hq] float32 or None
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    BLOCK_QUERIES: tl.constexpr,
    HEADS: tl.constexpr,  # of a program: 1, or GROUP rounded up
    TILE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
    INT8: tl.constexpr,  # the cache
    PDL: tl.constexpr,
):
    span = spans_ptr + 5 * tl.program_id(1)
    row = tl.load(span)
    query = tl.load(span + 1)
    first_tile = 0
    if partial_ptr is not None:
        first_tile = tl.load(span + 2) // TILE
    end = tl.load(span + 3)
    piece = tl.load(span + 4)
    if PDL:  # the list was uploaded before the pass began
        gdc_launch_dependents()
        gdc_wait()
    if row < 0:
        return
    begin = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - begin
    length = tl.load(lens_ptr + row)

    if HEADS == 1:
        head = tl.program_id(0)
        kv_head = head // GROUP
        member = query + tl.arange(0, BLOCK_QUERIES)
        exists = member < num_queries
    else:  # the rows of the tile are all heads of the first query, then all of the next
        place = tl.arange(0, BLOCK_QUERIES * HEADS)
        kv_head = tl.program_id(0)
        head = (kv_head * GROUP + place % HEADS)[:, None]
        member = query + place // HEADS
        exists = (member < num_queries) & (place % HEADS < GROUP)
    dim = tl.arange(0, BLOCK_DIM)
    token = (begin + member).to(tl.int64)[:, None]
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    out = out_ptr + token * stride_ot + head * stride_oh + dim[None, :]
    acc = tl.zeros([BLOCK_QUERIES * HEADS, BLOCK_DIM], tl.float32)
    if length <= 0:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
        return

    q = tl.load(q_ptr + token * stride_qt + head * stride_qh + dim[None, :], mask=mask, other=0.0)
    position = length - num_queries + member
    first_position = length - num_queries + query
    if scales_ptr is not None:
        if BLOCK_DIM <= 128:  # larger queries, converted in registers, would stay there and leave too few
            q = float8_query(q)
        if not INT8:
            scale_log2 *= tl.load(scales_ptr + kv_head)
    words_base = None
    if INT8:
        words_base = scales_ptr.to(tl.pointer_type(tl.int32)) + kv_head * BLOCK_SIZE
    k_base = k_ptr + kv_head * stride_head + dim[None, :]
    v_base = v_ptr + kv_head * stride_head + dim[None, :]
    table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    highest = tl.full([BLOCK_QUERIES * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES * HEADS], tl.float32)
    oldest, seen_from, inner_tile = position, 0, first_tile
    if WINDOW:  # from the inner tile on every query sees every first key
        oldest = first_seen(position, window)
        seen_from = tl.maximum(first_seen(first_position, window), 0)
        begin_tile = tl.maximum(seen_from // TILE, first_tile)
        inner_tile = (tl.maximum(first_seen(first_position + BLOCK_QUERIES - 1, window), 0) + TILE - 1) // TILE
        inner_tile = tl.maximum(inner_tile, begin_tile)
        acc, total, highest = _attend(
            acc, total, highest, q, k_base, v_base, words_base, table, position, oldest, seen_from,
            begin_tile * TILE, tl.minimum(inner_tile * TILE, end), length, scale_log2, stride_block, stride_token,
            True, WINDOW, HEAD_DIM, BLOCK_SIZE, TILE, BLOCK_DIM, PRECISION, NATIVE, SOFTCAP,
        )  # fmt: skip
    masked_tile = (first_position + 1) // TILE  # every query sees every key before it
    acc, total, highest = _attend(
        acc, total, highest, q, k_base, v_base, words_base, table, position, oldest, seen_from,
        inner_tile * TILE, tl.minimum(masked_tile * TILE, end), length, scale_log2, stride_block, stride_token,
        False, WINDOW, HEAD_DIM, BLOCK_SIZE, TILE, BLOCK_DIM, PRECISION, NATIVE, SOFTCAP,
    )  # fmt: skip
    acc, total, highest = _attend(
        acc, total, highest, q, k_base, v_base, words_base, table, position, oldest, seen_from,
        tl.maximum(masked_tile, inner_tile) * TILE, end, length, scale_log2, stride_block, stride_token,
        True, WINDOW, HEAD_DIM, BLOCK_SIZE, TILE, BLOCK_DIM, PRECISION, NATIVE, SOFTCAP,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    whole = total
    if sinks_ptr is not None:
        if HEADS == 1:
            sinks = tl.load(sinks_ptr + head)
        else:
            sinks = tl.load(sinks_ptr + kv_head * GROUP + tl.minimum(place % HEADS, GROUP - 1))
        if partial_ptr is None or piece < 0:  # of pieces, the merge adds it
            whole += sink_share(sinks, highest)
    acc = acc / whole[:, None]
    if scales_ptr is not None and not INT8:
        KV_HEADS = tl.num_programs(0) // GROUP if HEADS == 1 else tl.num_programs(0)
        acc *= tl.load(scales_ptr + KV_HEADS + kv_head)
    if partial_ptr is None or piece < 0:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        Q_HEADS = tl.num_programs(0) if HEADS == 1 else tl.num_programs(0) * GROUP
        part = (piece * BLOCK_QUERIES + member - query) * Q_HEADS
        part += head if HEADS == 1 else kv_head * GROUP + place % HEADS
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
        # Where a query saw nothing, behind it or before its window, this is minus infinity: no weight.
        tl.store(lse_ptr + part, highest + tl.log2(total), mask=exists)


@triton.jit(do_not_specialize=["merges_ptr"])
def _merge_blocks_kernel(
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [P, BLOCK_QUERIES, Hq, D] float32
    lse_ptr,  # [P, BLOCK_QUERIES, Hq] float32
    merges_ptr,  # [M, 4] int32: first token, first piece, number of pieces (0: no more of them), number of queries
    sinks_ptr,  # [Hq] float32 or None
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (h, m, g): every so many queries of one divided block and head, from the g-th on."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    merge = merges_ptr + tl.program_id(1) * 4
    token = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1)
    count = tl.load(merge + 2)
    num_queries = tl.where(count > 0, tl.load(merge + 3), 0)
    dim = tl.arange(0, BLOCK_DIM)
    sink_ptr = None if sinks_ptr is None else sinks_ptr + head
    if PDL:
        gdc_wait()
    for query in range(tl.program_id(2), num_queries, tl.num_programs(2)):
        part = (first * BLOCK_QUERIES + query) * num_heads + head
        merged = merge_pieces(
            partial_ptr, lse_ptr, part, count, BLOCK_QUERIES * num_heads, HEAD_DIM, BLOCK_PIECES, BLOCK_DIM, sink_ptr
        )
        out = out_ptr + (token + query) * stride_ot + head * stride_oh + dim
        tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    sliding_window: int,
    plan: PrefillPlan,
    kv_scales: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """out = attention of the queries in the plan's spans; all others stay. Shapes as in `paged_attention`.

    A query's result depends on the tile of keys and on how keys are cut, not on which queries share its program.
    """
    if not len(plan.spans):
        return
    q_heads, head_dim = q.shape[1:]
    kv_heads, config = k_cache.shape[2], plan.config
    group = q_heads // kv_heads
    heads = config.heads if config.heads >= group else 1  # spans may be cut for a model with smaller groups
    for spans in (plan.spans,) if len(plan.spans) <= MOST_SPANS else plan.spans.split(MOST_SPANS):
        _prefill_kernel[(q_heads if heads == 1 else kv_heads, len(spans))](
            q, k_cache, v_cache, out, plan.partial, plan.lse, slots, query_start, context_lens, block_tables, spans,
            kv_scales, sinks, scale * LOG2_E, sliding_window,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], out.stride(0), out.stride(1), block_tables.stride(0),
            GROUP=group, BLOCK_SIZE=k_cache.shape[1], WINDOW=sliding_window != 0, SOFTCAP=softcap, HEADS=heads,
            HEAD_DIM=head_dim, BLOCK_QUERIES=config.block_queries, TILE=config.tile,
            BLOCK_DIM=next_power_of_2(head_dim),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", NATIVE=has_instructions(q.device, k_cache.dtype),
            INT8=k_cache.dtype == torch.int8, **pdl(q.device),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if plan.partial is not None and plan.lse is not None and len(plan.merges):
        merge_blocks(out, plan.partial, plan.lse, plan.merges, sinks)


def merge_blocks(
    out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, merges: torch.Tensor, sinks: torch.Tensor | None = None
) -> None:
    """Write the blocks that were cut to ``out`` [T, Hq, D]; ``sinks`` [Hq], the others are as in `PrefillPlan`."""
    block_queries, q_heads, head_dim = partial.shape[1:]
    _merge_blocks_kernel[(q_heads, len(merges), MERGE_GROUPS)](
        out, partial, lse, merges, sinks, out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, BLOCK_QUERIES=block_queries, BLOCK_PIECES=8, BLOCK_DIM=next_power_of_2(head_dim),
        **pdl(out.device), num_warps=1,
    )  # fmt: skip
