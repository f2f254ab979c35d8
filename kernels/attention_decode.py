"""Paged attention of rows with one query each: split over the context, merged by a second kernel.

The grid depends only on the number of rows, lengths are read on the device: a captured CUDA graph serves any content.
All query heads of a KV head are packed into one tile (at least 16 rows, as the tensor cores need).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.target import target_of
from kernels.triton_import import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch shape of the decode kernel. tile: tokens per step; splits: most parts a row's context is cut into."""

    tile: int
    splits: int
    num_warps: int
    num_stages: int


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a small number for a CPU (the interpreter)."""
    target = target_of(device)
    return target.num_multiprocessors if target is not None else 4


def decode_config(num_rows: int, kv_heads: int, head_dim: int, element_size: int, processors: int) -> DecodeConfig:
    """The launch shape for these rows: enough programs to fill the device, whatever the lengths turn out to be."""
    programs = num_rows * kv_heads
    # Measured on an H200: two programs per multiprocessor already beat splitting and merging; below, four do best.
    splits = 1 if programs >= 1.5 * processors else min(MAX_SPLITS, max(1, round(4 * processors / programs)))
    padded = next_power_of_2(head_dim)
    if element_size > 2:
        return DecodeConfig(tile=16, splits=splits, num_warps=8, num_stages=1)
    if padded > 128:
        return DecodeConfig(tile=32, splits=splits, num_warps=4, num_stages=2)
    return DecodeConfig(tile=64, splits=splits, num_warps=4, num_stages=2)


@triton.jit
def _split_of(length, window, split, splits, TILE: tl.constexpr, MIN_TILES: tl.constexpr):
    """Which tiles a split has: (first token seen, first tile, end tile, number of splits that have any)."""
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    first_tile = first // TILE
    tiles = (length + TILE - 1) // TILE - first_tile
    share = tl.maximum((tiles + splits - 1) // splits, MIN_TILES)
    begin = tl.minimum(split * share, tiles)
    end = tl.minimum(begin + share, tiles)
    return first, first_tile + begin, first_tile + end, (tiles + share - 1) // share


@triton.jit(do_not_specialize=["slots_ptr", "lens_ptr", "window"])
def _decode_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [R, Hq, splits, D] float32: normalised results of the splits
    lse_ptr,  # [R, Hq, splits] float32: log2 of their sums of exponentials
    slots_ptr,  # [R]
    lens_ptr,  # [R]
    tables_ptr,  # [S, MB]
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
    MIN_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lens_ptr + row)
    first, tile_begin, tile_end, active = _split_of(length, window, split, splits, TILE, MIN_TILES)
    if (split > 0) & (split >= active):
        return

    member = tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + member
    mask_heads = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * stride_qt + head[:, None] * stride_qh + dim[None, :], mask=mask_heads, other=0.0)
    table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    k_base = k_ptr + kv_head * stride_head + dim[None, :]
    v_base = v_ptr + kv_head * stride_head + dim[None, :]

    highest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    for tile in tl.range(tile_begin, tile_end):
        place = tile * TILE + tl.arange(0, TILE)
        seen = (place < length) & (place >= first)
        block = tl.load(table + place // BLOCK_SIZE, mask=seen, other=0)
        block = tl.maximum(block, 0).to(tl.int64)[:, None]
        offset = (place % BLOCK_SIZE)[:, None]
        mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
        where = block * stride_block + offset * stride_token
        k = tl.load(k_base + where, mask=mask, other=0.0)
        v = tl.load(v_base + where, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision=PRECISION)
        highest = new_highest

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if active <= 1:
        out = out_ptr + row * stride_ot + head[:, None] * stride_oh + dim[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask_heads)
    else:
        part = (row * (tl.num_programs(0) * GROUP) + head) * splits + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask_heads)
        tl.store(lse_ptr + part, highest + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["lens_ptr", "window", "splits"])
def _combine_kernel(
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [R, Hq, splits, D] float32
    lse_ptr,  # [R, Hq, splits] float32
    lens_ptr,  # [R]
    window,
    splits,
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _first, _begin, _end, active = _split_of(tl.load(lens_ptr + row), window, 0, splits, TILE, MIN_TILES)
    if active <= 1:
        return  # the decode kernel wrote the result itself
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_DIM)
    part = (row * tl.num_programs(0) + head) * splits + split
    lse = tl.load(lse_ptr + part, mask=split < active, other=float("-inf"))
    mask = (split < active)[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    result = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    out = out_ptr + row * stride_ot + head * stride_oh + dim
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: int,
    scale: float,
    sliding_window: int,
    config: DecodeConfig | None = None,
) -> None:
    """out[:num_rows] = attention of q[:num_rows], one token per row; argument shapes as in `paged_attention`."""
    q_heads, head_dim = q.shape[1], q.shape[2]
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q_heads // kv_heads
    block_heads = max(16, next_power_of_2(group))
    config = config or decode_config(
        num_rows, kv_heads, head_dim, k_cache.element_size(), num_multiprocessors(q.device)
    )
    splits = config.splits
    shape = (num_rows, q_heads, splits) if splits > 1 else (1, 1, 1)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    common = {
        "HEAD_DIM": head_dim,
        "MIN_TILES": max(1, 64 // config.tile) if splits > 1 else 1,
        "TILE": config.tile,
        "BLOCK_DIM": next_power_of_2(head_dim),
    }
    _decode_kernel[(kv_heads, splits, num_rows)](
        q, k_cache, v_cache, out, partial, lse, slots, context_lens,
        block_tables, scale * LOG2_E, sliding_window,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], out.stride(0), out.stride(1),
        block_tables.stride(0),
        GROUP=group, BLOCK_SIZE=block_size, BLOCK_HEADS=block_heads,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **common,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(q_heads, num_rows)](
            out, partial, lse, context_lens, sliding_window, splits, out.stride(0), out.stride(1),
            BLOCK_SPLITS=max(MAX_SPLITS, next_power_of_2(splits)), **common, num_warps=4,
        )  # fmt: skip
