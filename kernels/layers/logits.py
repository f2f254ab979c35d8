"""What some families do to logits behind the head: a factor, and a soft cap."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton

BLOCK = 1024


def cap_logits_reference(logits: torch.Tensor, scale: float, softcap: float) -> None:
    """Multiply logits [R, V] float32 by ``scale`` in place; then make each c tanh(l / c), if ``softcap`` c is not 0."""
    if scale != 1.0:
        logits.mul_(scale)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)


@triton.jit
def soft_cap(x, cap):
    """cap * tanh(x / cap) of float32 x."""
    power = tl.exp2(tl.abs(x) * (-2.8853900817779268 / cap))  # at most 1, whatever x is
    capped = cap * (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -capped, capped)


@triton.jit
def _cap_logits_kernel(
    logits_ptr,  # [R, V] float32
    stride,
    scale,
    cap,
    SIZE: tl.constexpr,  # V
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits_ptr + tl.program_id(0).to(tl.int64) * stride + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(place, mask=column < SIZE, other=0.0) * scale
    if CAPPED:
        logits = soft_cap(logits, cap)
    tl.store(place, logits, mask=column < SIZE)


def cap_logits(logits: torch.Tensor, scale: float, softcap: float) -> None:
    """As `cap_logits_reference`."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1
    assert logits.dtype == torch.float32
    if num_rows:
        _cap_logits_kernel[(num_rows, -(-size // BLOCK))](
            logits, logits.stride(0), scale, softcap or 1.0, SIZE=size, BLOCK=BLOCK, CAPPED=softcap != 0,
            num_warps=4, **pdl(logits.device),
        )  # fmt: skip
