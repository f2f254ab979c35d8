"""Scales of quantized weights, as kernels read them."""

from __future__ import annotations

from pagebus.kernels.coded.unpack import widen_bits
from pagebus.kernels.common.triton import tl, triton


@triton.jit
def load_scale(scale_ptr, places):
    """float32; of exponents (uint8), two to the power of these less 127; of the bits of float8_e4m3fn (int8), that."""
    return widen_scale(tl.load(scale_ptr + places))


@triton.jit
def widen_scale(scale):
    """What `load_scale` gives, of what it loads."""
    if scale.dtype == tl.uint8:
        scale = exponent(scale)
    elif scale.dtype == tl.int8:
        scale = widen_bits(scale).to(tl.float32)
    return scale


@triton.jit
def exponent(code):
    """E8M0 as float32: the bits of its exponent, or of 2^-127, which is below normal numbers."""
    return tl.where(code == 0, 1 << 22, code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
