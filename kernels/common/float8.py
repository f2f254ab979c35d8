"""Keys and values in float8: divided by a scale per head, clamped to the format's largest number, rounded."""

from __future__ import annotations

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import constant, tl, triton

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def to_cache_reference(heads: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """heads [T, Hkv, D] as a cache of `dtype` holds them; a float8 one needs scales [Hkv], others have none."""
    if scales is None:
        return heads.to(dtype)
    largest = torch.finfo(dtype).max
    return (heads.float() * scales.reciprocal().unsqueeze(1)).clamp_(-largest, largest).to(dtype)


@triton.jit
def float8_query(q):
    """Queries as multiplied with a float8 cache: in float16, where its numbers are exact and conversion is cheapest."""
    if q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


_EVEN_ODD_E4M3 = constant("""{
    .reg .b32 sorted; .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
_EVEN_ODD_E5M2 = constant("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
"""Instructions that split four numbers in 32 bits into the two even and the two odd ones. Those of e5m2 are upper
halves of float16."""


def has_instructions(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels for ``device`` may convert a cache of ``dtype`` by inline assembly: not in the interpreter, nor
    float8 on old GPUs."""
    target = target_of(device)
    return target is not None and (target.capability >= 89 or dtype == torch.int8)


def largest_number(dtype: torch.dtype) -> float:
    """The largest number of a cache's format."""
    return torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max


@triton.jit
def unpack_pairs(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Two float8 numbers lie in each int16: the lower ones and the upper ones, in float16, where they are exact.

    NATIVE: by instructions that do four numbers in three steps or less, of which the compiler needs about ten.
    """
    if NATIVE:
        CODE: tl.constexpr = _EVEN_ODD_E5M2 if tl.float8e5 == FORMAT else _EVEN_ODD_E4M3
        return tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    lower = (x & 0xFF).to(tl.uint8).to(FORMAT, bitcast=True).to(tl.float16)
    upper = ((x >> 8) & 0xFF).to(tl.uint8).to(FORMAT, bitcast=True).to(tl.float16)
    return lower, upper
