"""Writing the new tokens' keys and values into the paged cache."""

from __future__ import annotations

import torch

from kernels.triton_import import next_power_of_2, tl, triton


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store k, v [T, Hkv, D] at slot_mapping [T] int64 (block * block_size + offset; negative: skip the token).

    k_cache, v_cache: strided views [num_blocks, block_size, Hkv, D] of one layer.
    """
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block_size = k_cache.shape[1]
    where = (slot_mapping // block_size, slot_mapping % block_size)
    k_cache[where] = k.to(k_cache.dtype)
    v_cache[where] = v.to(v_cache.dtype)


@triton.jit(do_not_specialize_on_alignment=["mapping_ptr"])
def _kv_write_kernel(
    k_ptr,  # [T, SIZE]
    v_ptr,  # [T, SIZE]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, SIZE]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, SIZE]
    mapping_ptr,  # [T] int64
    stride_k,
    stride_v,
    stride_k_block,
    stride_k_token,
    stride_v_block,
    stride_v_token,
    SIZE: tl.constexpr,  # Hkv * D
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(mapping_ptr + token).to(tl.int64)
    if target >= 0:
        block, offset = target // BLOCK_SIZE, target % BLOCK_SIZE
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < SIZE
        k = tl.load(k_ptr + token * stride_k + column, mask=mask)
        v = tl.load(v_ptr + token * stride_v + column, mask=mask)
        k_target = k_cache_ptr + block * stride_k_block + offset * stride_k_token + column
        v_target = v_cache_ptr + block * stride_v_block + offset * stride_v_token + column
        tl.store(k_target, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(v_target, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store k, v [T, Hkv, D] at slot_mapping [T] int64 of the cache views [num_blocks, block_size, Hkv, D]."""
    num_tokens, kv_heads, head_dim = k.shape
    assert v.shape == k.shape
    assert k_cache.shape == v_cache.shape
    assert k_cache.shape[2:] == k.shape[1:]
    for heads in (k, v, k_cache, v_cache):
        assert heads.stride(-1) == 1
        assert heads.stride(-2) == head_dim or kv_heads == 1
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    if num_tokens == 0:
        return
    size = kv_heads * head_dim
    block = min(1024, next_power_of_2(size))
    _kv_write_kernel[(num_tokens, -(-size // block))](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        SIZE=size,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK=block,
        num_warps=2 if block <= 512 else 4,
    )
