"""Everything between a layer's projections and its attention in one kernel: head norms, rotary embedding, cache writes.

Queries and keys are rotated in place, so that cuDNN can attend to them; keys and values are written to the cache. A
float8 cache stores them divided by a scale per head, clamped to the format's largest number and rounded. An int8 cache
stores each token and head divided by its own scale, and the scale as well (:mod:`pagebus.kernels.common.int8`).
"""

from __future__ import annotations

from typing import Any

import torch

from pagebus.kernels.common.float8 import largest_number, to_cache_reference
from pagebus.kernels.common.int8 import check_scales, quantize_halves, to_int8_reference
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.layers.norm import rms_norm_reference

MANY_TOKENS = 1024
"""From this many tokens on, a program computes all heads of one token, which moves memory faster; of fewer, some heads
of one, so that there are enough programs."""


def rotate_reference(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [T, H, D] turned by the angles whose cos and sin [T, 1, D / 2] are given, in the halves layout of GPT-NeoX
    and Llama: pair i is (i, i + D / 2). Computed in float32, rounded once."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def rotary_kv_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate queries and keys of qkv [T, Hq + 2 Hkv, D] in place, store keys and values; returns the queries.

    positions [T] integers, cos_sin [max_position, D] float32: cos | sin, each D / 2 wide. k_cache, v_cache: strided
    views [num_blocks, block_size, Hkv, D] of one layer; slot_mapping [T] int64 is block * block_size + offset, or
    negative: the token is not stored. q_norm, k_norm [D]: weights of an RMS norm of each head before the rotation.
    kv_scales, keys' and values': [2, Hkv] float32 for a float8 cache; for one in int8 a view of the scales in its
    blocks, which are written too (:func:`pagebus.kernels.common.int8.split_blocks`). Each stage rounds to qkv's dtype.
    """
    kv_heads = k_cache.shape[2]
    q, k, v = qkv.split_with_sizes((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    q.copy_(rotate_reference(q if q_norm is None else rms_norm_reference(q, q_norm, eps), cos, sin))
    k.copy_(rotate_reference(k if k_norm is None else rms_norm_reference(k, k_norm, eps), cos, sin))
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block_size = k_cache.shape[1]
    where = (slot_mapping // block_size, slot_mapping % block_size)
    for part, (heads, cache) in enumerate(((k, k_cache), (v, v_cache))):
        if kv_scales is not None and cache.dtype == torch.int8:
            cache[where], kv_scales[part][where] = to_int8_reference(heads, part)
        else:
            cache[where] = to_cache_reference(heads, cache.dtype, None if kv_scales is None else kv_scales[part])
    return q


@triton.jit
def norm_halves(first, second, first_weight, second_weight, eps, HALF: tl.constexpr):
    """RMS norm of heads given by their halves [BLOCK_HEADS, BLOCK_HALF]."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    square = tl.sum(wide_first * wide_first, axis=1) + tl.sum(wide_second * wide_second, axis=1)
    scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
    wide_first, wide_second = wide_first * scale, wide_second * scale
    if first_weight.dtype != tl.float32:  # see rms_norm_reference
        wide_first = wide_first.to(first.dtype).to(tl.float32)
        wide_second = wide_second.to(first.dtype).to(tl.float32)
    wide_first, wide_second = wide_first * first_weight.to(tl.float32), wide_second * second_weight.to(tl.float32)
    return wide_first.to(first.dtype), wide_second.to(first.dtype)


@triton.jit
def rotate_halves(first, second, cos, sin):
    """Rotate heads given by their halves."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    turned_first, turned_second = wide_first * cos - wide_second * sin, wide_second * cos + wide_first * sin
    return turned_first.to(first.dtype), turned_second.to(first.dtype)


@triton.jit
def _norm(first, second, weight_ptr, eps, mask, HALF: tl.constexpr):
    first_weight, second_weight = tl.load(weight_ptr, mask=mask), tl.load(weight_ptr + HALF, mask=mask)
    return norm_halves(first, second, first_weight, second_weight, eps, HALF)


@triton.jit
def _rotate(first, second, angle_ptr, mask, HALF: tl.constexpr):
    """Rotate by the angle whose cos | sin is at angle_ptr."""
    cos, sin = tl.load(angle_ptr, mask=mask, other=0.0), tl.load(angle_ptr + HALF, mask=mask, other=0.0)
    return rotate_halves(first, second, cos, sin)


@triton.jit
def store_halves(target, first, second, per_scale, mask, HALF: tl.constexpr, LARGEST: tl.constexpr):
    """Store heads given by their halves in the cache's format; per_scale [BLOCK_HEADS, 1], one number, or None."""
    if per_scale is not None:
        first = tl.clamp(first.to(tl.float32) * per_scale, -LARGEST, LARGEST)
        second = tl.clamp(second.to(tl.float32) * per_scale, -LARGEST, LARGEST)
    tl.store(target, first.to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_halves_int8(
    target, scale_target, first, second, mask, scale_mask, FLIP: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Store heads given by their halves, and their scales at scale_target [BLOCK_HEADS]."""
    first, second, scale = quantize_halves(first, second)
    tl.store(target, (first ^ FLIP).to(tl.int8), mask=mask)
    tl.store(target + HALF, (second ^ FLIP).to(tl.int8), mask=mask)
    tl.store(scale_target, scale, mask=scale_mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "mapping_ptr"])
def _rotary_kv_write_kernel(
    qkv_ptr,  # [T, Q_HEADS + 2 * KV_HEADS, 2 * HALF]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, 2 * HALF]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, 2 * HALF]
    mapping_ptr,  # [T] int64
    q_norm_ptr,  # [2 * HALF] or None
    k_norm_ptr,  # [2 * HALF] or None
    scales_ptr,  # [2, KV_HEADS] float32; in int8 [num_blocks, KV_HEADS, BLOCK_SIZE, 2] bfloat16, by blocks; or None
    eps,
    stride_qkv,
    stride_block,
    stride_token,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INT8: tl.constexpr,  # the cache
    LARGEST: tl.constexpr,  # of the cache's format
    PDL: tl.constexpr,
):
    # A program has some heads of one token: of its queries, of its keys or of its values.
    Q_PARTS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    PARTS: tl.constexpr = Q_PARTS + 2 * KV_PARTS
    part = tl.program_id(0) % PARTS
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    is_query, is_value = part < Q_PARTS, part >= Q_PARTS + KV_PARTS
    first_head = tl.where(is_query, 0, tl.where(is_value, Q_HEADS + KV_HEADS, Q_HEADS))
    part -= tl.where(is_query, 0, tl.where(is_value, Q_PARTS + KV_PARTS, Q_PARTS))
    member = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head, column = member[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < tl.where(is_query, Q_HEADS, KV_HEADS)) & (column < HALF)
    here = qkv_ptr + token * stride_qkv + (first_head + head) * (2 * HALF) + column
    per_scale = None
    if scales_ptr is not None and not INT8:
        scaled_head = tl.where(is_value, KV_HEADS, 0) + tl.minimum(head, KV_HEADS - 1)
        per_scale = tl.div_rn(1.0, tl.load(scales_ptr + scaled_head))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(here, mask=mask, other=0.0)
    second = tl.load(here + HALF, mask=mask, other=0.0)
    place = tl.load(mapping_ptr + token)
    there = place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token + head * (2 * HALF) + column
    if INT8:
        scale = scales_ptr + place // BLOCK_SIZE * (stride_block // 2) + (member * BLOCK_SIZE + place % BLOCK_SIZE) * 2
    if is_value:
        if place >= 0:
            if INT8:
                store_halves_int8(v_cache_ptr + there, scale + 1, first, second, mask, member < KV_HEADS, -128, HALF)
            else:
                store_halves(v_cache_ptr + there, first, second, per_scale, mask, HALF, LARGEST)
    else:
        if q_norm_ptr is not None:
            weight_ptr = tl.where(is_query, q_norm_ptr, k_norm_ptr) + column
            first, second = _norm(first, second, weight_ptr, eps, column < HALF, HALF)
        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + column
        first, second = _rotate(first, second, angle_ptr, column < HALF, HALF)
        tl.store(here, first, mask=mask)
        tl.store(here + HALF, second, mask=mask)
        if not is_query and place >= 0:
            if INT8:
                store_halves_int8(k_cache_ptr + there, scale, first, second, mask, member < KV_HEADS, 0, HALF)
            else:
                store_halves(k_cache_ptr + there, first, second, per_scale, mask, HALF, LARGEST)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "mapping_ptr"])
def _rotary_kv_write_tokens_kernel(
    qkv_ptr,  # [T, Q_HEADS + 2 * KV_HEADS, 2 * HALF]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, 2 * HALF]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, 2 * HALF]
    mapping_ptr,  # [T] int64
    q_norm_ptr,  # [2 * HALF] or None
    k_norm_ptr,  # [2 * HALF] or None
    scales_ptr,  # [2, KV_HEADS] float32; in int8 [num_blocks, KV_HEADS, BLOCK_SIZE, 2] bfloat16, by blocks; or None
    eps,
    stride_qkv,
    stride_block,
    stride_token,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INT8: tl.constexpr,  # the cache
    LARGEST: tl.constexpr,  # of the cache's format
    PDL: tl.constexpr,
):
    # A program has one token. The first have the last tokens: the L2 cache still holds these of the projections.
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    member = tl.arange(0, BLOCK_KV_HEADS)
    q_head, kv_head = tl.arange(0, BLOCK_Q_HEADS)[:, None], member[:, None]
    q_mask, kv_mask = (q_head < Q_HEADS) & (column < HALF), (kv_head < KV_HEADS) & (column < HALF)
    q = qkv_ptr + token * stride_qkv + q_head * (2 * HALF) + column
    k = qkv_ptr + token * stride_qkv + (Q_HEADS + kv_head) * (2 * HALF) + column
    v = k + KV_HEADS * (2 * HALF)
    k_per_scale = None
    v_per_scale = None
    if scales_ptr is not None and not INT8:
        scale_ptr = scales_ptr + tl.minimum(kv_head, KV_HEADS - 1)
        k_per_scale = tl.div_rn(1.0, tl.load(scale_ptr))
        v_per_scale = tl.div_rn(1.0, tl.load(scale_ptr + KV_HEADS))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.load(mapping_ptr + token)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + column
    q_first, q_second = tl.load(q, mask=q_mask, other=0.0), tl.load(q + HALF, mask=q_mask, other=0.0)
    k_first, k_second = tl.load(k, mask=kv_mask, other=0.0), tl.load(k + HALF, mask=kv_mask, other=0.0)
    v_first, v_second = tl.load(v, mask=kv_mask, other=0.0), tl.load(v + HALF, mask=kv_mask, other=0.0)
    if q_norm_ptr is not None:
        q_first, q_second = _norm(q_first, q_second, q_norm_ptr + column, eps, column < HALF, HALF)
        k_first, k_second = _norm(k_first, k_second, k_norm_ptr + column, eps, column < HALF, HALF)
    q_first, q_second = _rotate(q_first, q_second, angle_ptr, column < HALF, HALF)
    k_first, k_second = _rotate(k_first, k_second, angle_ptr, column < HALF, HALF)
    tl.store(q, q_first, mask=q_mask)
    tl.store(q + HALF, q_second, mask=q_mask)
    tl.store(k, k_first, mask=kv_mask)
    tl.store(k + HALF, k_second, mask=kv_mask)
    if place >= 0:
        there = place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token + kv_head * (2 * HALF) + column
        if INT8:
            scale = scales_ptr + place // BLOCK_SIZE * (stride_block // 2)
            scale += (member * BLOCK_SIZE + place % BLOCK_SIZE) * 2
            scaled = member < KV_HEADS
            store_halves_int8(k_cache_ptr + there, scale, k_first, k_second, kv_mask, scaled, 0, HALF)
            store_halves_int8(v_cache_ptr + there, scale + 1, v_first, v_second, kv_mask, scaled, -128, HALF)
        else:
            store_halves(k_cache_ptr + there, k_first, k_second, k_per_scale, kv_mask, HALF, LARGEST)
            store_halves(v_cache_ptr + there, v_first, v_second, v_per_scale, kv_mask, HALF, LARGEST)


def rotary_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Norm and rotate queries and keys of qkv [T, Hq + 2 Hkv, D] in place, store keys and values; returns the queries.
    Everything as in `rotary_kv_write_reference`. ``invariant``: a token has the same bits for any T."""
    num_tokens, num_heads, head_dim = qkv.shape
    _blocks, block_size, kv_heads, _dim = k_cache.shape
    q_heads = num_heads - 2 * kv_heads
    assert qkv.stride()[1:] == (head_dim, 1)
    assert k_cache.shape[3] == head_dim == cos_sin.shape[1]
    assert k_cache.shape == v_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[2:] == (head_dim, 1)
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert positions.is_contiguous()
    assert slot_mapping.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    assert (q_norm is None) == (k_norm is None)
    check_scales(k_cache, kv_scales)
    q = qkv[:, :q_heads]
    if num_tokens == 0:
        return q
    arguments = (
        qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, q_norm, k_norm, kv_scales, eps,
        qkv.stride(0), k_cache.stride(0), k_cache.stride(1),
    )  # fmt: skip
    common = {
        "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2, "BLOCK_SIZE": block_size,
        "BLOCK_HALF": next_power_of_2(head_dim // 2), "INT8": k_cache.dtype == torch.int8,
        "LARGEST": largest_number(k_cache.dtype),
        "enable_fp_fusion": False,  # products and sums are rounded one by one, as in torch
        **pdl(qkv.device),
    }  # fmt: skip
    if num_tokens >= MANY_TOKENS and not invariant:
        blocks = {"BLOCK_Q_HEADS": next_power_of_2(max(q_heads, 1)), "BLOCK_KV_HEADS": next_power_of_2(kv_heads)}
        _rotary_kv_write_tokens_kernel[(num_tokens,)](*arguments, **blocks, **common, num_warps=4)
        return q
    block_heads = min(8, next_power_of_2(max(q_heads, kv_heads)))
    parts = -(-q_heads // block_heads) + 2 * -(-kv_heads // block_heads)
    _rotary_kv_write_kernel[(num_tokens * parts,)](*arguments, BLOCK_HEADS=block_heads, **common, num_warps=2)
    return q


def rotary_kv_write_invariant(*args: Any, **keywords: Any) -> torch.Tensor:
    """`rotary_kv_write` with results independent of other tokens."""
    return rotary_kv_write(*args, **keywords, invariant=True)
