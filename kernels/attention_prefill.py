"""Paged attention of rows with several queries each: one program per block of queries and head, over ragged rows.

The grid depends on the number of tokens and rows only; each program finds its row by a binary search in query_start,
or, in a pass of fixed shape, is told it by a list (`query_spans`) that a captured CUDA graph reads from device memory.
Tiles of keys after the block's last query or before its sliding window are never visited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.float8 import float8_query
from kernels.triton_import import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch shape of the prefill kernel: queries per program, keys per step."""

    block_queries: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_config(
    max_query_len: int, max_context_len: int, head_dim: int, element_size: int, *, float8: bool = False
) -> PrefillConfig:
    """The launch shape; element_size in bytes, of queries; ``float8``: of the cache, which changes ``tile`` only.
    float32 runs without tensor cores, so its tiles are small."""
    padded = next_power_of_2(head_dim)
    if element_size > 2:
        return PrefillConfig(block_queries=16, tile=16 if padded > 64 else 32, num_warps=8, num_stages=1)
    if padded > 128:
        return PrefillConfig(block_queries=128, tile=16 if float8 else 32, num_warps=8, num_stages=2)
    if max_query_len >= 1024 and max_context_len >= 8192:
        return PrefillConfig(block_queries=128, tile=128, num_warps=8, num_stages=3)
    return PrefillConfig(block_queries=64, tile=64, num_warps=4, num_stages=2)


def query_spans(query_start: NDArray[np.int32], first_row: int, block_queries: int) -> NDArray[np.int32]:
    """The blocks of `block_queries` queries of the rows from first_row on, as (row, first query) each: [N, 2].

    query_start [R + 1] on the host. A row's later blocks, which have more keys, come before its earlier ones.
    """
    counts = -(-np.diff(query_start[first_row:]) // block_queries)
    ends = np.cumsum(counts, dtype=np.int32)
    spans = np.empty((int(counts.sum()), 2), np.int32)
    spans[:, 0] = np.repeat(np.arange(first_row, len(query_start) - 1, dtype=np.int32), counts)
    spans[:, 1] = (np.repeat(ends, counts) - 1 - np.arange(len(spans), dtype=np.int32)) * block_queries
    return spans


def fixed_config(head_dim: int, element_size: int, *, float8: bool = False) -> PrefillConfig:
    """The launch shape of a pass whose lengths are not known when it is launched, with `spans`."""
    return prefill_config(0, 0, head_dim, element_size, float8=float8)


@triton.jit
def _attend(
    acc, total, highest, q, k_base, v_base, table, position, begin, end, length, window, scale_log2,
    stride_block, stride_token,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys begin..end (a multiple of TILE apart) into the running softmax of one block of queries."""
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    place = begin + tl.arange(0, TILE)
    next_block = tl.load(table + place // BLOCK_SIZE, mask=place < length, other=0)
    for start in tl.range(begin, end, TILE):
        # Block ids are loaded a tile ahead: loads that wait for loads would take a stage of the pipeline.
        place = start + tl.arange(0, TILE)
        block = tl.maximum(next_block, 0).to(tl.int64)[:, None]
        after = place + TILE
        next_block = tl.load(table + after // BLOCK_SIZE, mask=after < length, other=0)
        mask = (place < length)[:, None] & (dim < HEAD_DIM) if MASKED else dim < HEAD_DIM
        offset = (place % BLOCK_SIZE)[:, None]
        where = block * stride_block + offset * stride_token
        k_tile = k_base + where
        v_tile = v_base + where
        if MASKED or HEAD_DIM != BLOCK_DIM:
            k = tl.load(k_tile, mask=mask, other=0.0)
            v = tl.load(v_tile, mask=mask, other=0.0)
        else:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if MASKED:
            seen = place[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (place[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
        base = new_highest
        if MASKED:  # a query may have seen nothing yet
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision=PRECISION)
        highest = new_highest
    return acc, total, highest


@triton.jit(do_not_specialize=["slots_ptr", "query_start_ptr", "lens_ptr", "spans_ptr", "window", "first_row",
                               "num_rows", "num_tokens", "search_steps"])  # fmt: skip
def _prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    out_ptr,  # [T, Hq, D]
    slots_ptr,  # [R]
    query_start_ptr,  # [R + 1]
    lens_ptr,  # [R]
    tables_ptr,  # [S, MB]
    spans_ptr,  # [N, 2] int32: row (negative: none) and first query of each block; None: found by search
    scales_ptr,  # [2, Hkv] float32: what a float8 cache's keys and values are to be multiplied with; else None
    scale_log2,
    window,
    first_row,  # rows (and tokens) before it belong to the decode kernel
    num_rows,  # R - first_row
    num_tokens,  # T
    search_steps,  # 2 ** search_steps > num_rows
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
    BLOCK_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    if spans_ptr is not None:
        row = tl.load(spans_ptr + 2 * tl.program_id(1))
        if row < 0:
            return
        query = tl.load(spans_ptr + 2 * tl.program_id(1) + 1)
        begin = tl.load(query_start_ptr + row)
        end = tl.load(query_start_ptr + row + 1)
        length = tl.load(lens_ptr + row)
    else:
        # Last blocks first: the later a block lies in its row, the more keys it has.
        index = tl.num_programs(1) - 1 - tl.program_id(1)

        # Row r's blocks begin at (its first token // BLOCK_QUERIES) + r, which leaves each row enough. The tokens after
        # the last row (padding) are taken as one more row, without context.
        low = 0
        high = num_rows
        for _step in range(search_steps):
            middle = (low + high + 1) // 2
            begin = tl.load(query_start_ptr + first_row + middle) - first_row
            below = begin // BLOCK_QUERIES + middle <= index
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle - 1)
        row = first_row + low
        begin = tl.load(query_start_ptr + row)
        end = num_tokens
        length = 0
        if low < num_rows:
            end = tl.load(query_start_ptr + row + 1)
            length = tl.load(lens_ptr + row)
        query = (index - ((begin - first_row) // BLOCK_QUERIES + low)) * BLOCK_QUERIES
    num_queries = end - begin
    if query >= num_queries:
        return

    member = query + tl.arange(0, BLOCK_QUERIES)
    dim = tl.arange(0, BLOCK_DIM)
    token = (begin + member).to(tl.int64)[:, None]
    mask = (member < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    out = out_ptr + token * stride_ot + head * stride_oh + dim[None, :]
    acc = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    if length <= 0:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
        return

    q = tl.load(q_ptr + token * stride_qt + head * stride_qh + dim[None, :], mask=mask, other=0.0)
    position = length - num_queries + member
    first_position = length - num_queries + query
    last_position = tl.minimum(first_position + BLOCK_QUERIES - 1, length - 1)
    kv_head = head // GROUP
    if scales_ptr is not None:
        if BLOCK_DIM <= 128:  # larger queries, converted in registers, would stay there and leave too few
            q = float8_query(q)
        scale_log2 *= tl.load(scales_ptr + kv_head)
    k_base = k_ptr + kv_head * stride_head + dim[None, :]
    v_base = v_ptr + kv_head * stride_head + dim[None, :]
    table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    if WINDOW:
        masked_begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    else:
        masked_begin = (first_position + 1) // TILE * TILE  # every query sees every key before it
        acc, total, highest = _attend(
            acc, total, highest, q, k_base, v_base, table, position, 0, masked_begin, length, window, scale_log2,
            stride_block, stride_token,
            False, WINDOW, HEAD_DIM, BLOCK_SIZE, TILE, BLOCK_DIM, PRECISION,
        )  # fmt: skip
    acc, total, highest = _attend(
        acc, total, highest, q, k_base, v_base, table, position, masked_begin, last_position + 1, length, window,
        scale_log2, stride_block, stride_token,
        True, WINDOW, HEAD_DIM, BLOCK_SIZE, TILE, BLOCK_DIM, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + tl.num_programs(0) // GROUP + kv_head)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    first_row: int,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    sliding_window: int,
    config: PrefillConfig | None = None,
    spans: torch.Tensor | None = None,
    *,
    invariant: bool = False,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """out[first_row:] = attention of rows from first_row on, as are their tokens; shapes as in `paged_attention`.

    With `spans` [N, 2] (see `query_spans`; a negative row is none) these blocks of queries alone, whatever first_row.
    A query's result depends on the tile of keys, but not on which other queries share its program: ``invariant`` takes
    one launch shape for all lengths.
    """
    num_tokens, q_heads, head_dim = q.shape
    num_rows = slots.shape[0] - first_row
    if invariant:
        max_query_len = max_context_len = 1
    config = config or prefill_config(
        max_query_len, max_context_len, head_dim, q.element_size(), float8=kv_scales is not None
    )
    if spans is not None:
        num_blocks = len(spans)
    else:
        num_blocks = -(-(num_tokens - first_row) // config.block_queries) + num_rows + 1
    _prefill_kernel[(q_heads, num_blocks)](
        q, k_cache, v_cache, out, slots, query_start, context_lens, block_tables, spans, kv_scales,
        scale * LOG2_E, sliding_window, first_row, num_rows, num_tokens, num_rows.bit_length(),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], out.stride(0), out.stride(1),
        block_tables.stride(0),
        GROUP=q_heads // k_cache.shape[2], HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1], WINDOW=sliding_window > 0,
        BLOCK_QUERIES=config.block_queries, TILE=config.tile, BLOCK_DIM=next_power_of_2(head_dim),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
