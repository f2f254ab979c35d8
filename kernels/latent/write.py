"""Rotates queries and the shared key, norms the latent, and stores what goes into the cache, in one kernel."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.layers.rotary_kv_write import rotate_halves

HEADS = 16
"""Query heads that a program turns."""


@triton.jit
def _store_entry(
    latent_ptr, norm_ptr, target_ptr, cos, sin, eps, half, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Norm a token's latent, turn the key behind it, and store both."""
    dim = tl.arange(0, BLOCK_RANK)
    latent = tl.load(latent_ptr + dim, mask=dim < RANK, other=0.0)
    wide = latent.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
    weight = tl.load(norm_ptr + dim, mask=dim < RANK, other=0.0)
    normed = wide.to(latent.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(target_ptr + dim, normed.to(latent.dtype).to(target_ptr.dtype.element_ty), mask=dim < RANK)
    inside = half < HALF
    first = tl.load(latent_ptr + RANK + half, mask=inside, other=0.0)
    second = tl.load(latent_ptr + RANK + HALF + half, mask=inside, other=0.0)
    first, second = rotate_halves(first, second, cos, sin)
    tl.store(target_ptr + RANK + half, first.to(target_ptr.dtype.element_ty), mask=inside)
    tl.store(target_ptr + RANK + HALF + half, second.to(target_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "mapping_ptr"])
def _latent_write_kernel(
    q_ptr,  # [T, H, N + 2 * HALF], here from the first number on that turns
    latents_ptr,  # [T, RANK + 2 * HALF]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + 2 * HALF]
    mapping_ptr,  # [T] int64
    norm_ptr,  # [RANK]
    eps,
    num_heads,
    stride_qt,
    stride_qh,
    stride_latent,
    stride_block,
    stride_token,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PARTS: tl.constexpr,  # programs of a token: those of its heads, and one behind them
    PDL: tl.constexpr,
):
    part, token = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    angle = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + half
    cos = tl.load(angle, mask=half < HALF, other=0.0)
    sin = tl.load(angle + HALF, mask=half < HALF, other=0.0)
    if part == PARTS - 1:
        place = tl.load(mapping_ptr + token)
        if place >= 0:
            target = cache_ptr + place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token
            _store_entry(
                latents_ptr + token * stride_latent, norm_ptr, target, cos, sin, eps, half, RANK, BLOCK_RANK, HALF
            )
    else:
        head = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        here = q_ptr + token * stride_qt + head[:, None] * stride_qh + half[None, :]
        mask = (head < num_heads)[:, None] & (half < HALF)[None, :]
        first, second = tl.load(here, mask=mask, other=0.0), tl.load(here + HALF, mask=mask, other=0.0)
        first, second = rotate_halves(first, second, cos[None, :], sin[None, :])
        tl.store(here, first, mask=mask)
        tl.store(here + HALF, second, mask=mask)


def latent_write(
    q: torch.Tensor,
    latents: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
) -> None:
    """Rotate queries in place, norm and rotate what goes into the cache, and store it: everything as in
    `latent_write_reference`. A token has the same bits for any number of tokens."""
    (num_tokens, heads, _), turned, rank = q.shape, cos_sin.shape[1], len(norm)
    assert latents.shape == (num_tokens, rank + turned)
    assert cache.shape[2] == rank + turned
    assert q.stride(2) == latents.stride(1) == cache.stride(2) == 1
    assert cos_sin.is_contiguous()
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert positions.is_contiguous()
    assert slot_mapping.is_contiguous()
    assert norm.is_contiguous()
    if not num_tokens:
        return
    block_heads = min(HEADS, next_power_of_2(heads))
    parts = -(-heads // block_heads) + 1
    _latent_write_kernel[(num_tokens * parts,)](
        q[..., -turned:], latents, positions, cos_sin, cache, slot_mapping, norm, eps, heads, *q.stride()[:2],
        latents.stride(0), *cache.stride()[:2],
        RANK=rank, HALF=turned // 2, BLOCK_RANK=next_power_of_2(rank), BLOCK_HALF=next_power_of_2(turned // 2),
        BLOCK_SIZE=cache.shape[1], BLOCK_HEADS=block_heads, PARTS=parts, enable_fp_fusion=False, **pdl(q.device),
        num_warps=2,
    )  # fmt: skip
