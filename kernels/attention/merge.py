"""What both kernels over pages need: capped scores, sinks, and the sum of the results of keys that were cut into
pieces.
"""

from __future__ import annotations

import torch

from pagebus.kernels.attention.decode_plan import DecodePlan
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton


@triton.jit
def cap_scores(scores, SOFTCAP: tl.constexpr):
    """Scores times log2(e), capped: c tanh(s / c) for each s, times log2(e) again."""
    CAP: tl.constexpr = SOFTCAP * 1.4426950408889634
    return CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)


@triton.jit
def sink_share(sink, highest):
    """What a head's sink adds to a sum of exponentials that has been divided by 2 ** highest: once for each row, so
    not to the sums of its pieces."""
    return tl.exp2(sink * 1.4426950408889634 - highest)


@triton.jit
def merge_pieces(
    partial_ptr,  # [.., D] float32: normalised results
    lse_ptr,  # [..] float32: log2 of their sums of exponentials; minus infinity: a piece in which nothing was seen
    part,  # the first piece
    count,
    stride,  # from a piece to the next
    HEAD_DIM: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    sink_ptr=None,  # of the head
):
    """The sum of ``count`` pieces of one query and head [BLOCK_DIM], each weighted by its share of the exponentials, of
    which the head's sink takes one too."""
    dim = tl.arange(0, BLOCK_DIM)
    highest = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for begin in range(0, count, BLOCK_PIECES):
        piece = begin + tl.arange(0, BLOCK_PIECES)
        where = part + piece * stride
        lse = tl.load(lse_ptr + where, mask=piece < count, other=float("-inf"))
        mask = (piece < count)[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(partial_ptr + where[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        highest_now = tl.maximum(highest, tl.max(lse, axis=0))
        base = tl.where(highest_now == float("-inf"), 0.0, highest_now)
        weights = tl.exp2(lse - base)
        decay = tl.exp2(highest - base)
        acc = acc * decay + tl.sum(values * weights[:, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        highest = highest_now
    if sink_ptr is not None:
        total += sink_share(tl.load(sink_ptr), highest)
    return acc / total


def merge_shape(plan: DecodePlan) -> tuple[int, int]:
    """(pieces per step, warps) of the merge: few rows have many pieces each, of many rows each has few."""
    return (64, 4) if plan.num_rows < 4 else (8, 1)


@triton.jit
def _merge_kernel(
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [I, QUERIES, Hq, D] float32
    lse_ptr,  # [I, QUERIES, Hq] float32
    merges_ptr,  # [M, 4]
    query_start_ptr,  # [R + 1] or None: rows are tokens
    sinks_ptr,  # [Hq] float32 or None
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One divided row, query of it, and head: the sum of its pieces, each weighted by its share of the exponentials."""
    if PDL:
        gdc_launch_dependents()
        if not SETTLED:
            gdc_wait()
    head = tl.program_id(0)
    fields = merges_ptr + tl.program_id(1) * 4
    row = tl.load(fields).to(tl.int64)
    first = tl.load(fields + 1)
    count = tl.load(fields + 2)
    query = tl.program_id(2)
    if query_start_ptr is not None and count > 0:
        begin = tl.load(query_start_ptr + row)
        if query >= tl.load(query_start_ptr + row + 1) - begin:
            count = 0
        row = (begin + query).to(tl.int64)
    if PDL and SETTLED:
        gdc_wait()
    if count == 0:
        return
    dim = tl.arange(0, BLOCK_DIM)
    num_heads = tl.num_programs(0)
    sink_ptr = None if sinks_ptr is None else sinks_ptr + head
    merged = merge_pieces(
        partial_ptr, lse_ptr, (first * QUERIES + query) * num_heads + head, count, QUERIES * num_heads, HEAD_DIM,
        BLOCK_PIECES, BLOCK_DIM, sink_ptr,
    )  # fmt: skip
    out = out_ptr + row * stride_ot + head * stride_oh + dim
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def merge_rows(out: torch.Tensor, plan: DecodePlan, sinks: torch.Tensor | None) -> None:
    """Write the decodes that were cut to ``out`` [T, Hq, D]."""
    q_heads, head_dim = out.shape[1:]
    block_pieces, warps = merge_shape(plan)
    _merge_kernel[(q_heads, len(plan.merges), plan.queries)](
        out, plan.partial, plan.lse, plan.merges, plan.query_start, sinks, out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, BLOCK_PIECES=block_pieces, BLOCK_DIM=next_power_of_2(head_dim),
        QUERIES=plan.queries, SETTLED=plan.settled, **pdl(out.device), num_warps=warps,
    )  # fmt: skip
