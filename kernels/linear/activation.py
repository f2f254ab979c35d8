"""SiLU-gated product of a fused gate_up projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:]. x [T, 2I] (gate | up) -> [T, I]; the SiLU is rounded to x's dtype first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit(do_not_specialize=["num_tokens"])
def _silu_mul_kernel(
    x_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    stride_x,
    num_tokens,
    SIZE: tl.constexpr,  # I
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + columns, mask=mask, other=0.0)
    activated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    product = activated * up.to(tl.float32)
    tl.store(out_ptr + token * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:]. x [T, 2I] (gate | up), contiguous rows -> [T, I]."""
    assert x.dim() == 2
    assert x.shape[1] % 2 == 0
    assert x.stride(1) == 1
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = min(1024, next_power_of_2(size))
    grid = (num_tokens, -(-size // block))
    _silu_mul_kernel[grid](x, out, x.stride(0), num_tokens, SIZE=size, BLOCK=block, num_warps=4, **pdl(x.device))
    return out
