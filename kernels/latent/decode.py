"""Attention of rows with one query each over latents: programs compute the pieces that a plan assigns, and a second
kernel merges the rows that were cut. :mod:`pagebus.kernels.attention.decode_plan` makes the plan."""

from __future__ import annotations

import torch

from pagebus.kernels.attention.decode_plan import DecodePlan
from pagebus.kernels.attention.merge import merge_pieces, merge_shape
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.latent.shape import LatentShape
from pagebus.kernels.latent.softmax import LOG2_E, attend_latents, load_queries


@triton.jit
def _latent_decode_kernel(
    q_ptr,  # [T, H, RANK]
    q_rope_ptr,  # [T, H, ROPE]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE]
    out_ptr,  # [T, H, RANK]
    partial_ptr,  # [I, H, RANK] float32: normalised results of items
    lse_ptr,  # [I, H] float32: log2 of their sums of exponentials
    items_ptr,  # [I, 8]
    program_items_ptr,  # [P + 1]
    tables_ptr,  # [S, MB]
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
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    exists = head < num_heads
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.load(program_items_ptr + tl.program_id(1))
    end_item = tl.load(program_items_ptr + tl.program_id(1) + 1)
    while item < end_item:
        fields = items_ptr + item * 8
        row = tl.load(fields).to(tl.int64)
        slot = tl.load(fields + 1).to(tl.int64)
        length = tl.load(fields + 2)
        begin = tl.load(fields + 3)
        end = tl.load(fields + 4)
        divided = tl.load(fields + 5)
        q, q_rope = load_queries(
            q_ptr, q_rope_ptr, row, head, exists, stride_qt, stride_qh, stride_rt, stride_rh,
            RANK, BLOCK_RANK, ROPE, BLOCK_ROPE,
        )  # fmt: skip
        position = tl.zeros([HEADS], tl.int32) + (length - 1)
        result, lse = attend_latents(
            q, q_rope, cache_ptr, tables_ptr + slot * stride_table, position, begin, end, length, scale_log2,
            stride_block, STRIDE_TOKEN, RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, BLOCK_SIZE, TILE, HEADS, PRECISION,
        )  # fmt: skip
        dim = tl.arange(0, BLOCK_RANK)[:, None]
        mask = exists[None, :] & (dim < RANK)
        if divided == 0:
            out = out_ptr + row * stride_ot + head[None, :] * stride_oh + dim
            tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part = item.to(tl.int64) * num_heads + head
            tl.store(partial_ptr + part[None, :] * RANK + dim, result, mask=mask)
            tl.store(lse_ptr + part, lse, mask=exists)
        item += 1


@triton.jit
def _merge_latents_kernel(
    out_ptr,  # [T, H, RANK]
    partial_ptr,  # [I, H, RANK] float32
    lse_ptr,  # [I, H] float32
    merges_ptr,  # [M, 4]
    stride_ot,
    stride_oh,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One divided row and head: the sum of its pieces, each weighted by its share of the exponentials."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    fields = merges_ptr + tl.program_id(1) * 4
    row = tl.load(fields).to(tl.int64)
    first = tl.load(fields + 1)
    count = tl.load(fields + 2)
    if count == 0:
        return
    merged = merge_pieces(
        partial_ptr, lse_ptr, first * num_heads + head, count, num_heads, RANK, BLOCK_PIECES, BLOCK_RANK
    )
    dim = tl.arange(0, BLOCK_RANK)
    out = out_ptr + row * stride_ot + head * stride_oh + dim
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=dim < RANK)


def latent_decodes(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    shape: LatentShape,
) -> None:
    """out[:R] = attended latents of q[:R], one token for each of the plan's R rows; shapes as in `latent_attention`."""
    config, (_, num_heads, rank) = plan.config, q.shape
    common = {"RANK": rank, "BLOCK_RANK": max(16, next_power_of_2(rank)), **pdl(q.device)}
    _latent_decode_kernel[(shape.programs_per_query, plan.num_programs)](
        q, q_rope, cache, out, plan.partial, plan.lse, plan.items, plan.program_items, block_tables, scale * LOG2_E,
        num_heads, *q.stride()[:2], *q_rope.stride()[:2], cache.stride(0), *out.stride()[:2], block_tables.stride(0),
        STRIDE_TOKEN=cache.stride(1), ROPE=q_rope.shape[2], BLOCK_ROPE=max(16, next_power_of_2(q_rope.shape[2])),
        BLOCK_SIZE=cache.shape[1], HEADS=shape.heads, TILE=config.tile,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **common,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    block_pieces, warps = merge_shape(plan)
    _merge_latents_kernel[(num_heads, len(plan.merges))](
        out, plan.partial, plan.lse, plan.merges, *out.stride()[:2], BLOCK_PIECES=min(block_pieces, 16), **common,
        num_warps=warps,
    )  # fmt: skip
