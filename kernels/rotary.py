"""Rotary position embedding of queries and keys, in place, with the halves layout of GPT-NeoX and Llama."""

from __future__ import annotations

import torch

from kernels.triton_import import next_power_of_2, tl, triton


def rotary_embedding_reference_(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by positions [T] (int32 or int64).

    cos_sin [max_position, rotary_dim] float32 holds cos | sin, each rotary_dim / 2 wide; the first rotary_dim <= D
    dimensions of a head are rotated. Computed in float32, rounded once. q and k may be views of a fused qkv.
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2] each
    for heads in (q, k):
        first, second = heads[..., :rotary_dim].float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads[..., :rotary_dim] = rotated.to(heads.dtype)


rotary_embedding_reference = rotary_embedding_reference_


@triton.jit
def _rotate(ptr, stride_head, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
            BLOCK_HALF: tl.constexpr):  # fmt: skip
    """Rotate the HEADS heads of one token at ptr; cos and sin [BLOCK_HALF]."""
    head, column = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < HEADS) & (column < HALF)
    where = ptr + head * stride_head + column
    first = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(where + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(where, (first * cos[None, :] - second * sin[None, :]).to(ptr.dtype.element_ty), mask=mask)
    tl.store(where + HALF, (second * cos[None, :] + first * sin[None, :]).to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _rotary_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)
    row = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + column
    cos = tl.load(row, mask=column < HALF, other=0.0)
    sin = tl.load(row + HALF, mask=column < HALF, other=0.0)
    if tl.program_id(1) == 0:
        _rotate(q_ptr + token * stride_qt, stride_qh, cos, sin, Q_HEADS, HALF, BLOCK_Q, BLOCK_HALF)
    else:
        _rotate(k_ptr + token * stride_kt, stride_kh, cos, sin, K_HEADS, HALF, BLOCK_K, BLOCK_HALF)


def rotary_embedding_(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by positions [T]; cos_sin [max_position, rotary_dim] float32."""
    num_tokens, q_heads, head_dim = q.shape
    half = cos_sin.shape[1] // 2
    assert k.shape[0] == num_tokens
    assert k.shape[2] == head_dim
    assert 2 * half == cos_sin.shape[1] <= head_dim
    assert q.stride(2) == 1
    assert k.stride(2) == 1
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert positions.shape == (num_tokens,)
    assert positions.is_contiguous()
    if num_tokens == 0:
        return
    block_q, block_half = next_power_of_2(q_heads), next_power_of_2(half)
    _rotary_kernel[(num_tokens, 2)](
        q,
        k,
        positions,
        cos_sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        Q_HEADS=q_heads,
        K_HEADS=k.shape[1],
        HALF=half,
        BLOCK_Q=block_q,
        BLOCK_K=next_power_of_2(k.shape[1]),
        BLOCK_HALF=block_half,
        num_warps=4 if block_q * block_half <= 4096 else 8,
    )


rotary_embedding = rotary_embedding_
