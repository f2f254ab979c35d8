"""Attention of long prompts: latents are copied out of the pages and expanded to keys and values of every head, which
takes fewer operations than attention over latents where many queries see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.latent.expanded_plan import DevicePiece, Sizes, pieces_on
from pagebus.kernels.latent.softmax import LOG2_E

GATHERED = 32
"""Tokens that a program copies."""


@triton.jit(do_not_specialize=["slots_ptr"])
def _gather_latents_kernel(
    cache_ptr,  # [num_blocks, BLOCK_SIZE, SIZE]
    out_ptr,  # [keys, SIZE]
    segments_ptr,  # [S, 4]
    slots_ptr,  # [R]
    tables_ptr,  # [S, MB]
    stride_block,
    stride_table,
    STRIDE_TOKEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    segment = segments_ptr + 4 * tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, first = tl.load(segment), tl.load(segment + 1)
    count, at = tl.load(segment + 2), tl.load(segment + 3)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live, place = token < count, first + token
    table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    block = tl.maximum(tl.load(table + place // BLOCK_SIZE, mask=live, other=0), 0).to(tl.int64)
    source = cache_ptr + (block * stride_block + place % BLOCK_SIZE * STRIDE_TOKEN)[:, None]
    target = out_ptr + ((at + token).to(tl.int64) * SIZE)[:, None]
    for start in tl.static_range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = live[:, None] & (column < SIZE)
        tl.store(target + column, tl.load(source + column, mask=mask), mask=mask)


@triton.jit
def _attend_expanded(
    acc, total, highest, q, q_rope, made_ptr, shared_ptr, position, begin, end, base_key, scale_log2, stride_made,
    stride_entry,
    MASKED: tl.constexpr, NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys begin..end into the running softmax of a block of queries."""
    nope, rope, value = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_ROPE), tl.arange(0, BLOCK_VALUE)
    for start in tl.range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        at = (base_key + place).to(tl.int64)
        inside = (place < end)[:, None]
        made, shared = made_ptr + at[:, None] * stride_made, shared_ptr + at[:, None] * stride_entry
        if MASKED or NOPE != BLOCK_NOPE or ROPE != BLOCK_ROPE or VALUE != BLOCK_VALUE:
            k = tl.load(made + nope[None, :], mask=inside & (nope < NOPE)[None, :], other=0.0)
            k_rope = tl.load(shared + rope[None, :], mask=inside & (rope < ROPE)[None, :], other=0.0)
            v = tl.load(made + NOPE + value[None, :], mask=inside & (value < VALUE)[None, :], other=0.0)
        else:
            k, k_rope = tl.load(made + nope[None, :]), tl.load(shared + rope[None, :])
            v = tl.load(made + NOPE + value[None, :])
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION) * scale_log2
        if MASKED:
            seen = (place[None, :] <= position[:, None]) & (place < end)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        base = new_highest
        if MASKED:
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        highest = new_highest
    return acc, total, highest


@triton.jit
def _expanded_kernel(
    q_ptr,  # [T, H, NOPE + ROPE]
    made_ptr,  # [keys, H, NOPE + VALUE]
    shared_ptr,  # [keys, .. + ROPE], here from the shared key on
    out_ptr,  # [T, H, VALUE]
    partial_ptr,  # [T, H, VALUE] float32: results so far, normalised; of one number if there is one piece
    lse_ptr,  # [T, H] float32: log2 of their sums of exponentials
    spans_ptr,  # [N, 8]
    scale_log2,
    stride_qt,
    stride_qh,
    stride_made,
    stride_entry,
    stride_ot,
    stride_oh,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    span = spans_ptr + 8 * tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count, position = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    base_key, begin, end = tl.load(span + 3), tl.load(span + 4), tl.load(span + 5)
    member = tl.arange(0, BLOCK_QUERIES)
    nope, rope, value = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_ROPE), tl.arange(0, BLOCK_VALUE)
    token = (first + member).to(tl.int64)
    exists = (member < count)[:, None]
    queries = q_ptr + (token * stride_qt + head * stride_qh)[:, None]
    q = tl.load(queries + nope[None, :], mask=exists & (nope < NOPE)[None, :], other=0.0)
    q_rope = tl.load(queries + NOPE + rope[None, :], mask=exists & (rope < ROPE)[None, :], other=0.0)
    mask = exists & (value < VALUE)[None, :]
    acc = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32)
    highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    part = token * num_heads + head
    if tl.load(span + 6) > 0:  # a result and its sum of exponentials are a running softmax with a total of 1
        acc = tl.load(partial_ptr + part[:, None] * VALUE + value[None, :], mask=mask, other=0.0)
        highest = tl.load(lse_ptr + part, mask=member < count, other=0.0)
        total += 1.0
    made_ptr += head * (NOPE + VALUE)
    # Every query sees the keys before the block's first. Begins are multiples of a tile, or the row's first key.
    whole = begin + tl.maximum(tl.minimum(position + 1, end) - begin, 0) // TILE * TILE
    acc, total, highest = _attend_expanded(
        acc, total, highest, q, q_rope, made_ptr, shared_ptr, position + member, begin, whole, base_key, scale_log2,
        stride_made, stride_entry,
        False, NOPE, BLOCK_NOPE, ROPE, BLOCK_ROPE, VALUE, BLOCK_VALUE, TILE, PRECISION,
    )  # fmt: skip
    acc, total, highest = _attend_expanded(
        acc, total, highest, q, q_rope, made_ptr, shared_ptr, position + member, whole, end, base_key, scale_log2,
        stride_made, stride_entry,
        True, NOPE, BLOCK_NOPE, ROPE, BLOCK_ROPE, VALUE, BLOCK_VALUE, TILE, PRECISION,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    if tl.load(span + 7) > 0:
        tl.store(partial_ptr + part[:, None] * VALUE + value[None, :], acc, mask=mask)
        tl.store(lse_ptr + part, highest + tl.log2(total), mask=member < count)
    else:
        out = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + value[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def block_queries_of(sizes: Sizes) -> int:
    """Queries of a program."""
    return 16 if sizes.element_size > 2 else 128


def expanded_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    expansion: torch.Tensor,
    out: torch.Tensor,
    *,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    rows: Sequence[LongRow],
) -> None:
    """Attention of ``rows`` of q [T, H, N + R], rotated, into ``out`` [T, H, V]; other tokens stay.

    cache: a layer's latents and shared keys [num_blocks, block_size, K + R]; expansion [H, N + V, K].
    """
    (heads, both, rank), value = expansion.shape, out.shape[2]
    sizes = Sizes(heads, both - value, cache.shape[2] - rank, value, rank, q.element_size())
    assert q.shape[1:] == (heads, sizes.nope + sizes.rope)
    assert q.stride(2) == out.stride(2) == cache.stride(2) == 1
    pieces = pieces_on(tuple(rows), block_queries_of(sizes), sizes.keys_together, q.device)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    kept = len(q) * heads if len(pieces) > 1 else 1
    running = torch.empty(kept * value, **floats), torch.empty(kept, **floats)
    for piece in pieces:
        entries = _gather(cache, slots, block_tables, piece)
        made = F.linear(entries[:, :rank], expansion.flatten(0, 1))
        _attend(q, made, entries[:, rank:], out, running, piece, sizes, scale)
        del made, entries  # before the next are made


def _gather(
    cache: torch.Tensor, slots: torch.Tensor, block_tables: torch.Tensor, piece: DevicePiece
) -> torch.Tensor:  # fmt: skip
    """The piece's latents and shared keys [keys, K + R]."""
    entries = cache.new_empty(piece.keys, cache.shape[2])
    _gather_latents_kernel[(-(-piece.longest // GATHERED), len(piece.segments))](
        cache, entries, piece.segments, slots, block_tables, cache.stride(0), block_tables.stride(0),
        STRIDE_TOKEN=cache.stride(1), SIZE=cache.shape[2], BLOCK=min(128, next_power_of_2(cache.shape[2])),
        BLOCK_SIZE=cache.shape[1], TOKENS=GATHERED, **pdl(cache.device), num_warps=4,
    )  # fmt: skip
    return entries


def _attend(
    q: torch.Tensor, made: torch.Tensor, shared: torch.Tensor, out: torch.Tensor,
    running: tuple[torch.Tensor, torch.Tensor], piece: DevicePiece, sizes: Sizes, scale: float,
) -> None:  # fmt: skip
    narrow = sizes.element_size > 2
    large = next_power_of_2(sizes.nope) + next_power_of_2(sizes.value) > 256
    _expanded_kernel[(sizes.heads, len(piece.spans))](
        q, made, shared, out, *running, piece.spans, scale * LOG2_E, *q.stride()[:2], made.stride(0),
        shared.stride(0), *out.stride()[:2],
        NOPE=sizes.nope, ROPE=sizes.rope, VALUE=sizes.value, BLOCK_NOPE=max(16, next_power_of_2(sizes.nope)),
        BLOCK_ROPE=max(16, next_power_of_2(sizes.rope)), BLOCK_VALUE=max(16, next_power_of_2(sizes.value)),
        BLOCK_QUERIES=block_queries_of(sizes), TILE=16 if narrow else 32 if large else 64,
        PRECISION="ieee" if narrow else "tf32", **pdl(q.device), num_warps=8, num_stages=1 if narrow else 2,
    )  # fmt: skip
