"""Attention of rows with several queries over latents, without expanding them. The host has cut them into spans
(:mod:`pagebus.kernels.attention.prefill_plan`); a program has some queries of a span with some of their heads."""

from __future__ import annotations

import torch

from pagebus.kernels.attention.prefill import PrefillPlan, merge_blocks
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.latent.softmax import LOG2_E, attend_latents, load_queries


@triton.jit(do_not_specialize=["slots_ptr", "query_start_ptr", "lens_ptr", "spans_ptr"])
def _latent_prefill_kernel(
    q_ptr,  # [T, H, RANK]
    q_rope_ptr,  # [T, H, ROPE]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE]
    out_ptr,  # [T, H, RANK]
    partial_ptr,  # [P, BLOCK_QUERIES, H, RANK] float32: normalised results of pieces; None: there are none
    lse_ptr,  # [P, BLOCK_QUERIES, H] float32: log2 of their sums of exponentials
    slots_ptr,  # [R]
    query_start_ptr,  # [R + 1]
    lens_ptr,  # [R]
    tables_ptr,  # [S, MB]
    spans_ptr,  # [N, 5] int32: row (negative: none), first query, first key, end of keys, piece (negative: the block)
    scale_log2,
    num_heads,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_block,
    stride_ot,
    stride_oh,
    stride_table,
    STRIDE_TOKEN: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    blocks = tl.cdiv(num_heads, HEADS)  # of a span
    span = spans_ptr + 5 * (tl.program_id(0) // blocks)
    row = tl.load(span)
    query = tl.load(span + 1)
    begin = 0
    if partial_ptr is not None:
        begin = tl.load(span + 2)
    end = tl.load(span + 3)
    piece = tl.load(span + 4)
    if PDL:  # the list was uploaded before the pass began
        gdc_launch_dependents()
        gdc_wait()
    if row < 0:
        return
    first = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - first
    length = tl.load(lens_ptr + row)
    place = tl.arange(0, BLOCK_QUERIES * HEADS)  # all heads of the first query, then all of the next
    head = tl.program_id(0) % blocks * HEADS + place % HEADS
    member = query + place // HEADS
    exists = (member < num_queries) & (head < num_heads)
    token = (first + member).to(tl.int64)
    q, q_rope = load_queries(
        q_ptr, q_rope_ptr, token, head, exists, stride_qt, stride_qh, stride_rt, stride_rh,
        RANK, BLOCK_RANK, ROPE, BLOCK_ROPE,
    )  # fmt: skip
    slot = tl.load(slots_ptr + row).to(tl.int64)
    result, lse = attend_latents(
        q, q_rope, cache_ptr, tables_ptr + slot * stride_table, length - num_queries + member, begin, end, length,
        scale_log2, stride_block, STRIDE_TOKEN, RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, BLOCK_SIZE, TILE,
        BLOCK_QUERIES * HEADS, PRECISION,
    )  # fmt: skip
    dim = tl.arange(0, BLOCK_RANK)[:, None]
    mask = exists[None, :] & (dim < RANK)
    if partial_ptr is None or piece < 0:
        out = out_ptr + (token * stride_ot + head * stride_oh)[None, :] + dim
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = (piece * BLOCK_QUERIES + place // HEADS).to(tl.int64) * num_heads + head
        tl.store(partial_ptr + part[None, :] * RANK + dim, result, mask=mask)
        tl.store(lse_ptr + part, lse, mask=exists)


def latent_prefills(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: PrefillPlan,
) -> None:
    """out = attended latents of the queries in the plan's spans; all others stay. Shapes as in `latent_attention`."""
    if not len(plan.spans):
        return
    config, (_, num_heads, rank) = plan.config, q.shape
    _latent_prefill_kernel[(len(plan.spans) * -(-num_heads // config.heads),)](
        q, q_rope, cache, out, plan.partial, plan.lse, slots, query_start, context_lens, block_tables, plan.spans,
        scale * LOG2_E, num_heads, *q.stride()[:2], *q_rope.stride()[:2], cache.stride(0), *out.stride()[:2],
        block_tables.stride(0),
        STRIDE_TOKEN=cache.stride(1), RANK=rank, BLOCK_RANK=max(16, next_power_of_2(rank)), ROPE=q_rope.shape[2],
        BLOCK_ROPE=max(16, next_power_of_2(q_rope.shape[2])), BLOCK_SIZE=cache.shape[1],
        BLOCK_QUERIES=config.block_queries, HEADS=config.heads, TILE=config.tile,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **pdl(q.device),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if plan.partial is not None and plan.lse is not None and len(plan.merges):
        merge_blocks(out, plan.partial, plan.lse, plan.merges)
