"""Paged attention of rows with one query each, or with a few: a run. Programs compute the pieces that a plan assigns; a
second kernel merges them.

All query heads of a KV head are computed together, and all queries of a run, so that keys are read once for them. Keys
and values are the left factors of both products, queries and weights the right ones: tensor cores take 16 rows of the
left factor and 8 columns of the right, so few heads waste little. :mod:`pagebus.kernels.attention.decode_plan` assigns
the pieces.
"""

from __future__ import annotations

import math

import torch

from pagebus.kernels.attention.addresses import pair_offsets, part_offsets, tile_blocks
from pagebus.kernels.attention.decode_plan import DecodePlan
from pagebus.kernels.attention.forms.launch import most_registers
from pagebus.kernels.attention.fused_decode import cache_token, cache_token_int8, join_halves, select_halves, turn_group
from pagebus.kernels.attention.merge import cap_scores, merge_rows, sink_share
from pagebus.kernels.common.float8 import float8_query, has_instructions, largest_number, unpack_pairs
from pagebus.kernels.common.int8 import (
    ONES,
    PER_UNIT,
    VALUE_BIAS,
    split_queries,
    token_scales,
    unpack_value_pairs,
    value_pairs,
)
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.reach import first_seen
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634
LEAST_DIM = 32
"""The least inner dimension of products of int8."""


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    q_ptr,  # [T, Hq, D], or [T, Hq + 2 Hkv, D] as the projections left it, if RAW
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [I, QUERIES, Hq, D] float32: normalised results of items
    lse_ptr,  # [I, QUERIES, Hq] float32: log2 of their sums of exponentials
    items_ptr,  # [I, 8]
    program_items_ptr,  # [P + 1]
    query_start_ptr,  # [R + 1]: the tokens of runs; None: rows are tokens
    tables_ptr,  # [S, MB]
    scales_ptr,  # [2, Hkv] float32: what a float8 cache's keys and values are to be multiplied with; or, in int8,
    # [num_blocks, Hkv, BLOCK_SIZE, 2] bfloat16, with a block's stride; else None
    sinks_ptr,  # [Hq] float32 or None
    cos_sin_ptr,  # [max_position, D] float32 if RAW, else None; the next two as well
    q_norm_ptr,  # [D] or None
    k_norm_ptr,  # [D] or None
    eps,
    scale_log2,
    window,
    stride_qt,
    stride_qh,
    stride_block,
    stride_ot,
    stride_oh,
    stride_table,
    STRIDE_TOKEN: tl.constexpr,  # known when compiling, a tile's addresses are a few registers and constants
    STRIDE_HEAD: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    QUERIES: tl.constexpr,  # the most of a run
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,  # tokens that never lie in two blocks
    BLOCK_HEADS: tl.constexpr,  # columns: the heads of one query behind those of another
    BLOCK_DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
    INT8: tl.constexpr,  # the cache
    LARGEST: tl.constexpr,  # of the cache's format
    SETTLED: tl.constexpr,  # the plan may be read before waiting
    PDL: tl.constexpr,
):
    # Values of one byte are read two at a time, as numbers of 16 bits: tensor cores want them transposed, which
    # loads do for 16 bits only. Even and odd columns of the result are then summed up apart.
    PAIRS: tl.constexpr = scales_ptr is not None
    FLOAT8: tl.constexpr = PAIRS and not INT8
    ELEMENT: tl.constexpr = q_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float16 if PAIRS and tl.bfloat16 == ELEMENT else ELEMENT
    # Over int8 products of queries and keys are of whole numbers, and values are multiplied as they are stored.
    WHOLE: tl.constexpr = INT8 and tl.float16 == WIDE
    RAW: tl.constexpr = cos_sin_ptr is not None
    RUNS: tl.constexpr = query_start_ptr is not None
    MEMBERS: tl.constexpr = GROUP * QUERIES
    KEY_ROW: tl.constexpr = GROUP % BLOCK_HEADS  # see turn_group
    STEP: tl.constexpr = 2 if PAIRS else 1
    COLUMNS: tl.constexpr = BLOCK_DIM // STEP
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    if PDL and not SETTLED:
        gdc_wait()
    member = tl.arange(0, BLOCK_HEADS)
    head = kv_head * GROUP + member
    query = 0
    if RUNS:
        head, query = kv_head * GROUP + member % GROUP, member // GROUP
    dim = tl.arange(0, BLOCK_DIM)
    column = tl.arange(0, COLUMNS)
    token = tl.arange(0, TILE)
    mask_dim = dim < HEAD_DIM
    if RAW and HEAD_DIM < BLOCK_DIM:  # each half is padded, as turn_group pads those of the queries
        mask_dim = dim % (BLOCK_DIM // 2) < HEAD_DIM // 2
        dim -= dim // (BLOCK_DIM // 2) * ((BLOCK_DIM - HEAD_DIM) // 2)
    mask_columns = column < HEAD_DIM // STEP
    mask_member = (member < GROUP)[None, :]
    mask_out = mask_member & mask_columns[:, None]
    k_head_ptr = k_ptr + kv_head * STRIDE_HEAD
    k_inside = (token % PART)[:, None] * STRIDE_TOKEN + dim[None, :]
    v_scale, k_per_scale, v_per_scale = 1.0, None, None
    if WHOLE:
        v_scale = PER_UNIT
    if FLOAT8:
        k_scale = tl.load(scales_ptr + kv_head)
        v_scale = tl.load(scales_ptr + tl.num_programs(0) + kv_head)
        scale_log2 *= k_scale
        if RAW:
            k_per_scale, v_per_scale = tl.div_rn(1.0, k_scale), tl.div_rn(1.0, v_scale)
    v_ptr_pairs = v_ptr
    if PAIRS:
        v_ptr_pairs = v_ptr.to(tl.pointer_type(tl.int16))
    if INT8:
        words_ptr = scales_ptr.to(tl.pointer_type(tl.int32)) + kv_head * BLOCK_SIZE
    v_head_ptr = v_ptr_pairs + kv_head * (STRIDE_HEAD // STEP)
    v_inside = (token % PART)[None, :] * (STRIDE_TOKEN // STEP) + column[:, None]
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head, mask=member < MEMBERS, other=0.0)
    item = tl.load(program_items_ptr + program)
    end_item = tl.load(program_items_ptr + program + 1)
    fields = items_ptr + item * 8
    live = item < end_item
    row = tl.load(fields, mask=live, other=0).to(tl.int64)
    slot = tl.load(fields + 1, mask=live, other=0).to(tl.int64)
    length = tl.load(fields + 2, mask=live, other=0)
    begin = tl.load(fields + 3, mask=live, other=0)
    end = tl.load(fields + 4, mask=live, other=0)
    divided = tl.load(fields + 5, mask=live, other=0)
    table_ptr = tables_ptr + slot * stride_table
    blocks = tile_blocks(table_ptr, begin, end, TILE, BLOCK_SIZE, PART)
    if PDL:
        gdc_launch_dependents()
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
        position, count = length - 1, 1
        if RUNS:
            first = tl.load(query_start_ptr + row)
            count = tl.load(query_start_ptr + row + 1) - first
            row = (first + query).to(tl.int64)  # of each column
            position = length - count + query
            mask_member = (member // GROUP < count)[None, :]
            mask_out = mask_member & mask_columns[:, None]
        if RAW:
            # The program with the row's last token puts the newest key and value into the cache, and reads them there.
            newest = tl.maximum(length - 1, 0)
            kept = (length > 0) & (end >= length)
            block = tl.load(table_ptr + newest // BLOCK_SIZE, mask=kept, other=-1).to(tl.int64)
            target = kv_head * STRIDE_HEAD + block * stride_block + newest % BLOCK_SIZE * STRIDE_TOKEN
            token_ptr = q_ptr + row * stride_qt
            first, second, first_key, second_key = turn_group(
                token_ptr, kv_head, tl.num_programs(0), newest, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps, kept,
                GROUP, HEAD_DIM // 2, BLOCK_HEADS, BLOCK_DIM // 2, PDL and SETTLED,
            )  # fmt: skip
            q = select_halves(first, second) if WHOLE else join_halves(first, second)
            value_ptr = token_ptr + (num_heads + tl.num_programs(0) + kv_head) * HEAD_DIM
            if INT8:
                pair = kv_head * BLOCK_SIZE + block * (stride_block // 4) + newest % BLOCK_SIZE
                cache_token_int8(
                    first_key, second_key, value_ptr, k_ptr + target, v_ptr + target, scales_ptr + 2 * pair,
                    kept & (block >= 0), KEY_ROW, HEAD_DIM // 2,
                )  # fmt: skip
            else:
                cache_token(
                    first_key, second_key, value_ptr, k_ptr + target, v_ptr + target, k_per_scale, v_per_scale,
                    kept & (block >= 0), KEY_ROW, HEAD_DIM // 2, LARGEST,
                )  # fmt: skip
        else:
            if PDL and SETTLED:
                gdc_wait()
            if WHOLE:
                q = q_ptr + row * stride_qt + head[:, None] * stride_qh + dim[None, :]
                q = tl.load(q, mask=(member < GROUP)[:, None] & mask_dim[None, :], other=0.0)
            else:
                q = (q_ptr + row * stride_qt + head * stride_qh)[None, :] + dim[:, None]
                q = tl.load(q, mask=mask_member & mask_dim[:, None], other=0.0)
        if FLOAT8:
            q = float8_query(q)
        if WHOLE:
            q_high, q_low, q_scale = split_queries(q)
            q_scale *= scale_log2
        highest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
        # Sums over a tile's tokens need all warps; those over tiles are made first.
        totals = tl.zeros([TILE, BLOCK_HEADS], tl.float32)
        plain_totals = tl.zeros([TILE, BLOCK_HEADS], tl.float32)
        acc = tl.zeros([COLUMNS, BLOCK_HEADS], tl.float32)
        acc_odd = tl.zeros([COLUMNS, BLOCK_HEADS], tl.float32)
        oldest = 0
        if WINDOWED:
            oldest = first_seen(length - count, window)
            first_shown = first_seen(position, window)
        for tile_begin in tl.range(begin, end, TILE):
            place = tile_begin + token
            seen = place < end
            if WINDOWED:
                seen &= place >= oldest
            offsets = part_offsets(blocks, tile_begin, stride_block, STRIDE_TOKEN, TILE, BLOCK_SIZE, PART)
            if INT8:
                words = words_ptr + pair_offsets(blocks, tile_begin, stride_block, TILE, BLOCK_SIZE, PART)
                words = tl.load(words, mask=seen, other=ONES)
            blocks = tile_blocks(table_ptr, tile_begin + TILE, end, TILE, BLOCK_SIZE, PART)
            k = tl.load((k_head_ptr + offsets[:, None]) + k_inside, mask=seen[:, None] & mask_dim[None, :], other=0.0)
            v = (v_head_ptr + offsets[None, :] // STEP) + v_inside
            v = tl.load(v, mask=seen[None, :] & mask_columns[:, None], other=0)
            if WHOLE:
                scores = tl.dot(k, tl.trans(q_low), tl.dot(k, tl.trans(q_high)) * 254, out_dtype=tl.int32)
                scores = scores.to(tl.float32) * q_scale[None, :]
            else:
                scores = tl.dot(k.to(q.dtype), q, input_precision=PRECISION) * scale_log2
            if INT8:
                k_scale, v_log, per_v_scale = token_scales(words, NATIVE and WHOLE)
                if SOFTCAP > 0:
                    scores = cap_scores(scores * k_scale[:, None], SOFTCAP) + v_log[:, None]
                else:
                    scores = tl.fma(scores, k_scale[:, None], v_log[:, None])
            elif SOFTCAP > 0:
                scores = cap_scores(scores, SOFTCAP)
            shown = seen[:, None]
            if RUNS:
                shown &= place[:, None] <= position[None, :]
                if WINDOWED:
                    shown &= place[:, None] >= first_shown[None, :]
            scores = tl.where(shown, scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, axis=0))
            base = new_highest
            if RUNS:  # a query may have seen nothing yet
                base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - base[None, :])
            decay = tl.exp2(highest - base)
            if INT8:
                totals = tl.fma(totals, decay[None, :], weights * per_v_scale[:, None])
            else:
                totals = tl.fma(totals, decay[None, :], weights)
            weights = weights.to(WIDE)
            if WHOLE:
                plain_totals = tl.fma(plain_totals, decay[None, :], weights.to(tl.float32))
                v, odd = unpack_value_pairs(v, NATIVE)
                acc_odd = tl.fma(acc_odd, decay[None, :], tl.dot(odd, weights))
                acc = tl.fma(acc, decay[None, :], tl.dot(v, weights))
            else:
                if INT8:
                    v, odd = value_pairs(v, WIDE)
                elif FLOAT8:
                    v, odd = unpack_pairs(v, v_ptr.dtype.element_ty, NATIVE)
                if PAIRS:
                    acc_odd = tl.dot(odd.to(WIDE), weights, acc_odd * decay[None, :], input_precision=PRECISION)
                acc = tl.dot(v.to(WIDE), weights, acc * decay[None, :], input_precision=PRECISION)
            highest = new_highest

        table_ptr = tables_ptr + next_slot * stride_table
        blocks = tile_blocks(table_ptr, next_begin, next_end, TILE, BLOCK_SIZE, PART)
        total = tl.sum(totals, axis=0)
        if RUNS:  # where a query saw nothing of a piece, its highest score, minus infinity, is told
            total = tl.where(total > 0, total, 1.0)
        whole = total
        if sinks_ptr is not None:  # of pieces, the merge adds it
            whole += tl.where(divided == 0, sink_share(sinks, highest), 0.0)
        share = (v_scale / tl.where(whole > 0, whole, 1.0))[None, :]
        if WHOLE:
            bias = tl.sum(plain_totals, axis=0)[None, :] * VALUE_BIAS
            acc, acc_odd = acc - bias, acc_odd - bias
        if divided == 0:
            out = (out_ptr + row * stride_ot + head * stride_oh)[None, :] + column[:, None] * STEP
            tl.store(out, (acc * share).to(out_ptr.dtype.element_ty), mask=mask_out)
            if PAIRS:
                tl.store(out + 1, (acc_odd * share).to(out_ptr.dtype.element_ty), mask=mask_out)
        else:
            part = (item * QUERIES + query) * num_heads + head
            partial = partial_ptr + part[None, :] * HEAD_DIM + column[:, None] * STEP
            tl.store(partial, acc * share, mask=mask_out)
            if PAIRS:
                tl.store(partial + 1, acc_odd * share, mask=mask_out)
            tl.store(lse_ptr + part, highest + tl.log2(total), mask=member < MEMBERS)
        item += 1
        row, length, divided, begin, end = next_row, next_length, next_divided, next_begin, next_end
    if PDL:
        gdc_wait()  # even without any item: waiting is transitive


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    sliding_window: int,
    plan: DecodePlan,
    kv_scales: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """out[:R] = attention of q[:R], one token for each of the plan's R rows, or of the tokens of its runs; shapes as in
    `paged_attention`.

    With ``cos_sin`` q is [T, Hq + 2 Hkv, D], and its keys and values go into the cache: see `rotary_attention`.
    """
    q_heads, head_dim = out.shape[1], out.shape[2]
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q_heads // kv_heads
    stride_block, stride_token, stride_head, _ = k_cache.stride()
    config = plan.config
    assert plan.query_start is None or (cos_sin is None and k_cache.dtype != torch.int8)
    limited = config.num_warps == 4 and q.element_size() == 2
    block_heads = max(8, next_power_of_2(group * plan.queries))
    common = {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": max(LEAST_DIM, next_power_of_2(head_dim)),
        "SETTLED": plan.settled,
        **pdl(q.device),
    }
    _decode_kernel[(kv_heads, plan.num_programs)](
        q, k_cache, v_cache, out, plan.partial, plan.lse, plan.items, plan.program_items, plan.query_start,
        block_tables, kv_scales, sinks, cos_sin, q_norm, k_norm, eps, scale * LOG2_E, sliding_window,
        q.stride(0), q.stride(1), stride_block, out.stride(0), out.stride(1), block_tables.stride(0),
        STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head, GROUP=group, QUERIES=plan.queries, BLOCK_SIZE=block_size,
        TILE=config.tile, PART=math.gcd(plan.cut, block_size), BLOCK_HEADS=block_heads,
        WINDOWED=sliding_window != 0, SOFTCAP=softcap,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", NATIVE=has_instructions(q.device, k_cache.dtype),
        INT8=k_cache.dtype == torch.int8, LARGEST=largest_number(k_cache.dtype), **common,
        num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=most_registers(head_dim, group * plan.queries) if limited else None,
        enable_fp_fusion=False,  # newest keys are rounded as by the kernel that writes them otherwise
    )  # fmt: skip
    merge_rows(out, plan, sinks)
