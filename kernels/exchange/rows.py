"""What kernels of sums do with rows: a rank's own part, the sum's way into the residual, and its norm."""

from __future__ import annotations

from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.layers.norm import norm_rows


@triton.jit
def own_part(x_ptr, offsets, mask, stride_part, TYPE: tl.constexpr, PARTS: tl.constexpr):
    """This rank's part of the sum, from PARTS sums of its own, in the format that is exchanged."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * stride_part + offsets, mask=mask, other=0.0)
    return x.to(TYPE)


@triton.jit
def into_residual(x, residual, factor, SCALED: tl.constexpr):
    """What a residual becomes, rounded as by `add_rms_norm_reference`."""
    if SCALED:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    return (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)


@triton.jit
def norm_row(x, weight, eps, SIZE: tl.constexpr):
    """The RMS norm of a row [BLOCK], not yet rounded."""
    return tl.reshape(norm_rows(x[None, :], weight, eps, SIZE), x.shape)
