"""Keys and values of one byte each: divided by a scale per head, cut off at the format's largest number, rounded."""

from __future__ import annotations

import torch

from kernels.triton_import import tl, triton

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def to_cache_reference(heads: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """heads [T, Hkv, D] as a cache of `dtype` holds them; a float8 one needs scales [Hkv], others have none."""
    if scales is None:
        return heads.to(dtype)
    largest = torch.finfo(dtype).max
    return (heads.float() * scales.reciprocal().unsqueeze(1)).clamp_(-largest, largest).to(dtype)


@triton.jit
def float8_query(q):
    """Queries as they meet a float8 cache: in float16, where its numbers are exact and their conversion is cheapest."""
    if q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def unpack_pairs(x, FORMAT: tl.constexpr):
    """Two float8 numbers lie in each int16: the lower ones and the upper ones, in float16, where they are exact."""
    lower = (x & 0xFF).to(tl.uint8).to(FORMAT, bitcast=True).to(tl.float16)
    upper = ((x >> 8) & 0xFF).to(tl.uint8).to(FORMAT, bitcast=True).to(tl.float16)
    return lower, upper
