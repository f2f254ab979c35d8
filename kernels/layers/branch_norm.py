"""Where what is added to the residual stream is normed itself: that norm, the sum, and the norm that follows."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.layers.norm import norm_rows, rms_norm_reference


def add_normed_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, following: torch.Tensor | None
) -> torch.Tensor | None:
    """residual += rms_norm(x) (in place), then the norm of that with the weight ``following`` [D], if there is one.

    residual [T, D], weight [D] -> [T, D] or None. x is [T, D], or float32 [S, T, D], whose sum over S is rounded to the
    residual's dtype first. Each stage is rounded as in `rms_norm_reference`.
    """
    whole = x if x.dim() == 2 else x.sum(0).to(residual.dtype)
    residual += rms_norm_reference(whole, weight, eps)
    return None if following is None else rms_norm_reference(residual, following, eps)


@triton.jit
def _add_normed_kernel(
    x_ptr,  # [T, D]; with PARTS > 1 float32 [PARTS, T, D]
    residual_ptr,  # [T, D]
    weight_ptr,  # [D]
    following_ptr,  # [D] or None: no second norm
    out_ptr,  # [T, D] or None, likewise
    stride_part,
    stride_x,
    stride_residual,
    eps,
    SIZE: tl.constexpr,  # D
    BLOCK: tl.constexpr,  # D rounded up
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (column < SIZE)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = x_ptr + token * stride_x + column[None, :]
    x = tl.load(place, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(place + part * stride_part, mask=mask, other=0.0)
    there = residual_ptr + token * stride_residual + column[None, :]
    residual = tl.load(there, mask=mask, other=0.0)
    x = x.to(residual.dtype)
    branch = norm_rows(x, weight, eps, SIZE).to(residual.dtype)
    total = (branch.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    tl.store(there, total, mask=mask)
    if following_ptr is not None:
        second = tl.load(following_ptr + column, mask=column < SIZE, other=0.0)
        normed = norm_rows(total, second, eps, SIZE)
        tl.store(out_ptr + token * SIZE + column[None, :], normed.to(out_ptr.dtype.element_ty), mask=mask)


def add_normed(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, following: torch.Tensor | None
) -> torch.Tensor | None:
    """As `add_normed_reference`."""
    num_tokens, size = residual.shape
    assert x.shape[-2:] == residual.shape
    assert x.stride(-1) == residual.stride(1) == 1
    assert weight.shape == (size,)
    assert weight.is_contiguous()
    assert following is None or (following.shape == (size,) and following.is_contiguous())
    out = None if following is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    parts = x.unsqueeze(0) if x.dim() == 2 else x
    assert parts.dtype == (residual.dtype if len(parts) == 1 else torch.float32)
    block = next_power_of_2(size)
    _add_normed_kernel[(num_tokens,)](
        parts, residual, weight, following, out, parts.stride(0), parts.stride(1), residual.stride(0), eps,
        SIZE=size, BLOCK=block, PARTS=len(parts), num_warps=min(16, max(4, block // 512)), **pdl(x.device),
    )  # fmt: skip
    return out
