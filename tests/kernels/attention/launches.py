"""Tensors of no memory, for launches that are compiled for GPUs that are not here."""

from __future__ import annotations

import torch

from pagebus.kernels.common.int8 import block_bytes, split_blocks


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_cache(dtype: torch.dtype, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of the second of two layers, and their scales or None."""
    if dtype == torch.int8:
        blocks = meta(1024, block_bytes(2, 16, kv_heads, head_dim), dtype=dtype)
        numbers, scales = split_blocks(blocks, 2, kv_heads, head_dim)
        return numbers[:, 1, 0], numbers[:, 1, 1], scales[1]
    cache = meta(1024, 2, 2, 16, kv_heads, head_dim, dtype=dtype)
    scales = meta(2, kv_heads, dtype=torch.float32) if dtype.itemsize == 1 else None
    return cache[:, 1, 0], cache[:, 1, 1], scales
