"""Copies pages of the cache to contiguous tokens, and merges two attention results."""

from __future__ import annotations

import torch

from pagebus.kernels.common.int8 import check_scales, from_int8_reference
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

INT8_TOKENS = 32
"""Tokens of a program that copies one head."""


def gather_tokens_reference(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, first: int, k_out: torch.Tensor,
    v_out: torch.Tensor, block_tables: torch.Tensor, kv_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Copy keys and values of B sequences from position ``first`` on, as many of each, to k_out, v_out [B * n, Hkv, D].

    k_cache, v_cache [num_blocks, block_size, Hkv, D]; slots [B] int32: their rows of block_tables [S, MB] int32. Those
    of a float8 cache are multiplied with kv_scales [2, Hkv] float32, those in int8 with their own (`check_scales`).
    """
    block_size = k_cache.shape[1]
    place = first + torch.arange(len(k_out) // len(slots), device=k_cache.device)
    where = (
        block_tables[slots.long()].long()[:, place // block_size].flatten(),
        (place % block_size).repeat(len(slots)),
    )
    for part, (cache, out) in enumerate(((k_cache, k_out), (v_cache, v_out))):
        if kv_scales is None:
            out.copy_(cache[where])
        elif cache.dtype == torch.int8:
            out.copy_(from_int8_reference(cache[where], kv_scales[part][where], part))
        else:
            out.copy_(cache[where].float() * kv_scales[part].unsqueeze(1))


@triton.jit(do_not_specialize=["slots_ptr", "first", "num_tokens"])
def _gather_kernel(
    k_ptr,  # [num_blocks, BLOCK_SIZE, SIZE]
    v_ptr,  # [num_blocks, BLOCK_SIZE, SIZE]
    k_out_ptr,  # [B * n, Hkv, OUT_DIM]
    v_out_ptr,  # [B * n, Hkv, OUT_DIM]
    slots_ptr,  # [B]
    tables_ptr,  # [S, MB]
    scales_ptr,  # [2, Hkv] float32: what a float8 cache's keys and values are to be multiplied with; else None
    first,
    num_tokens,  # n
    stride_block,
    stride_token,
    stride_table,
    SIZE: tl.constexpr,  # Hkv * D
    HEAD_DIM: tl.constexpr,  # D
    OUT_DIM: tl.constexpr,  # from one head of the copies to the next
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    place = first + token
    sequence = tl.program_id(1)
    table = tables_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * stride_table
    block = tl.load(table + place // BLOCK_SIZE, mask=live, other=0)
    source = (tl.maximum(block, 0).to(tl.int64) * stride_block + (place % BLOCK_SIZE) * stride_token)[:, None]
    target = ((sequence.to(tl.int64) * num_tokens + token) * (SIZE // HEAD_DIM * OUT_DIM))[:, None]
    for start in tl.static_range(0, SIZE, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        mask = live[:, None] & (column < SIZE)
        k = tl.load(k_ptr + source + column, mask=mask)
        v = tl.load(v_ptr + source + column, mask=mask)
        if scales_ptr is not None:
            scale_ptr = scales_ptr + tl.minimum(column, SIZE - 1) // HEAD_DIM
            k = (k.to(tl.float32) * tl.load(scale_ptr)).to(k_out_ptr.dtype.element_ty)
            v = (v.to(tl.float32) * tl.load(scale_ptr + SIZE // HEAD_DIM)).to(v_out_ptr.dtype.element_ty)
        there = target + column
        if OUT_DIM != HEAD_DIM:
            there += column // HEAD_DIM * (OUT_DIM - HEAD_DIM)
        tl.store(k_out_ptr + there, k, mask=mask)
        tl.store(v_out_ptr + there, v, mask=mask)


@triton.jit(do_not_specialize=["slots_ptr", "first", "num_tokens"])
def _gather_int8_kernel(
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, HEAD_DIM]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, HEAD_DIM]
    k_out_ptr,  # [B * n, Hkv, OUT_DIM]
    v_out_ptr,  # [B * n, Hkv, OUT_DIM]
    slots_ptr,  # [B]
    tables_ptr,  # [S, MB]
    scales_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, 2] bfloat16, with a block's stride
    first,
    num_tokens,  # n
    stride_block,
    stride_token,
    stride_table,
    HEAD_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (t, b, h): some tokens of a sequence and head."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    place, sequence, head = first + token, tl.program_id(1), tl.program_id(2)
    table = tables_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * stride_table
    block = tl.maximum(tl.load(table + place // BLOCK_SIZE, mask=live, other=0), 0).to(tl.int64)
    scale_ptr = scales_ptr + block * (stride_block // 2) + (head * BLOCK_SIZE + place % BLOCK_SIZE) * 2
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    mask = live[:, None] & (dim < HEAD_DIM)
    source = (block * stride_block + (place % BLOCK_SIZE) * stride_token)[:, None] + head * HEAD_DIM + dim
    k, v = tl.load(k_ptr + source, mask=mask, other=0), tl.load(v_ptr + source, mask=mask, other=0)
    k_scale, v_scale = tl.load(scale_ptr, mask=live, other=0.0), tl.load(scale_ptr + 1, mask=live, other=0.0)
    k = k.to(tl.float32) * k_scale.to(tl.float32)[:, None]
    v = (v ^ -128).to(tl.float32) * v_scale.to(tl.float32)[:, None]
    target = sequence.to(tl.int64) * num_tokens + token
    target = (target * tl.num_programs(2) + head)[:, None] * OUT_DIM + dim
    tl.store(k_out_ptr + target, k.to(k_out_ptr.dtype.element_ty), mask=mask)
    tl.store(v_out_ptr + target, v.to(v_out_ptr.dtype.element_ty), mask=mask)


def gather_tokens(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, first: int, k_out: torch.Tensor,
    v_out: torch.Tensor, block_tables: torch.Tensor, kv_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Copy keys and values of sequences from position ``first`` on, as `gather_tokens_reference` does. In k_out and
    v_out heads may be padded; what is behind them stays."""
    kv_heads, head_dim = k_out.shape[1:]
    num_tokens, size = len(k_out) // len(slots), kv_heads * head_dim
    assert len(k_out) == len(slots) * num_tokens
    assert slots.is_contiguous()
    assert k_out.shape == v_out.shape
    out_dim = k_out.stride(1) if kv_heads > 1 else k_out.stride(0)
    assert k_out.stride() == v_out.stride() == (kv_heads * out_dim, out_dim, 1)
    assert kv_scales is not None or k_out.dtype == k_cache.dtype
    check_scales(k_cache, kv_scales)
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    assert k_cache.stride(2) == head_dim or kv_heads == 1
    if num_tokens == 0:
        return
    arguments = (
        k_cache, v_cache, k_out, v_out, slots, block_tables, kv_scales, first, num_tokens, k_cache.stride(0),
        k_cache.stride(1), block_tables.stride(0),
    )  # fmt: skip
    if k_cache.dtype == torch.int8:
        _gather_int8_kernel[(-(-num_tokens // INT8_TOKENS), len(slots), kv_heads)](
            *arguments, HEAD_DIM=head_dim, OUT_DIM=out_dim, BLOCK_DIM=next_power_of_2(head_dim),
            BLOCK_SIZE=k_cache.shape[1], TOKENS=INT8_TOKENS, num_warps=4,
        )  # fmt: skip
        return
    tokens, block = 8, min(1024, next_power_of_2(size))
    _gather_kernel[(-(-num_tokens // tokens), len(slots))](
        *arguments, SIZE=size, HEAD_DIM=head_dim, OUT_DIM=out_dim, BLOCK_SIZE=k_cache.shape[1], TOKENS=tokens,
        BLOCK=block, num_warps=4,
    )  # fmt: skip


def merge_attention_reference(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over two sets of keys from that over each: first, second [T, H, D], and the natural logarithms of their
    sums of exponentials [T, H]. -> the same for both, in ``out`` or a new tensor.

    A logarithm of minus infinity is an empty set: its values do not count.
    """
    total = torch.logaddexp(first_lse, second_lse)
    shares = [(part - total).exp().unsqueeze(2) for part in (first_lse, second_lse)]
    parts = [torch.where(share > 0, values.float(), 0) for share, values in zip(shares, (first, second), strict=True)]
    result = (parts[0] * shares[0] + parts[1] * shares[1]).to(first.dtype)
    return (result if out is None else out.copy_(result)), total


@triton.jit(
    do_not_specialize=["first_lse_ptr", "second_lse_ptr", "stride_flt", "stride_flh", "stride_slt", "stride_slh"]
)
def _merge_sets_kernel(
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H]
    first_ptr,  # [T, H, D]
    first_lse_ptr,  # [T, H]
    second_ptr,  # [T, H, D]
    second_lse_ptr,  # [T, H]
    num_heads,  # H
    stride_ot,
    stride_oh,
    stride_ft,
    stride_fh,
    stride_st,
    stride_sh,
    stride_flt,
    stride_flh,
    stride_slt,
    stride_slh,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    live = head < num_heads
    mask = live[:, None] & (dim < HEAD_DIM)
    first_lse = tl.load(first_lse_ptr + token * stride_flt + head * stride_flh, mask=live, other=0.0)
    second_lse = tl.load(second_lse_ptr + token * stride_slt + head * stride_slh, mask=live, other=0.0)
    peak = tl.maximum(first_lse, second_lse)
    first_share, second_share = tl.exp(first_lse - peak), tl.exp(second_lse - peak)
    total = first_share + second_share
    tl.store(lse_ptr + token * num_heads + head, peak + tl.log(total), mask=live)
    first_share, second_share = (first_share / total)[:, None], (second_share / total)[:, None]
    first = tl.load(first_ptr + token * stride_ft + head[:, None] * stride_fh + dim, mask=mask, other=0.0)
    second = tl.load(second_ptr + token * stride_st + head[:, None] * stride_sh + dim, mask=mask, other=0.0)
    result = tl.where(first_share > 0, first.to(tl.float32), 0) * first_share
    result += tl.where(second_share > 0, second.to(tl.float32), 0) * second_share
    out = out_ptr + token * stride_ot + head[:, None] * stride_oh + dim
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)


def merge_attention(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over two sets of keys from that over each, as `merge_attention_reference` does. ``out`` is neither of
    the inputs: threads that share an element read it at different times."""
    num_tokens, num_heads, head_dim = first.shape
    out = torch.empty_like(first) if out is None else out
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=first.device)
    assert second.shape == out.shape == first.shape
    assert first_lse.shape == second_lse.shape == lse.shape
    assert out.stride(2) == first.stride(2) == second.stride(2) == 1
    if num_tokens == 0:
        return out, lse
    block_heads = min(16, next_power_of_2(num_heads))
    _merge_sets_kernel[(num_tokens, -(-num_heads // block_heads))](
        out, lse, first, first_lse, second, second_lse, num_heads, *out.stride()[:2], *first.stride()[:2],
        *second.stride()[:2], *first_lse.stride(), *second_lse.stride(),
        HEAD_DIM=head_dim, BLOCK_HEADS=block_heads, BLOCK_DIM=next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return out, lse
