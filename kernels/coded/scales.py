"""Scales of quantized weights, as kernels read them."""

from __future__ import annotations

from pagebus.kernels.common.triton import tl, triton


@triton.jit
def load_scale(scale_ptr, places):
    """float32; of exponents, two to the power of these less 127."""
    scale = tl.load(scale_ptr + places)
    if scale.dtype == tl.uint8:
        scale = exponent(scale)
    return scale


@triton.jit
def exponent(code):
    """E8M0 as float32: the bits of its exponent, or of 2^-127, which is below normal numbers."""
    return tl.where(code == 0, 1 << 22, code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
