"""Root-mean-square normalization, alone and fused with the residual addition before it.

The added term may still be partial sums of a product (`pagebus.kernels.linear.linear.partial_linear`); the norm then
adds them up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.kernels.coded.rounding import LARGEST, LEAST, RoundedTokens, round_rows, rounded_like, rounded_reference
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton


class HalfNorm(NamedTuple):
    """A norm that the product behind it completes: ``x`` [T, D] is multiplied by the norm's weight, but not yet divided
    by its root mean square; that follows from ``squares`` [S, T] float32, sums over S parts of D, and ``eps``."""

    x: torch.Tensor
    squares: torch.Tensor
    eps: float


class NextNorm(NamedTuple):
    """The norm behind a product that goes into the residual: ``weight`` [D], ``eps``, and ``counters`` for the product
    itself, int32 [D], which are 0 between launches."""

    weight: torch.Tensor
    eps: float
    counters: torch.Tensor


class Addition(NamedTuple):
    """What a product goes into: ``residual`` [T, D], in place; ``weight`` [D] is that of the norm of the sum, whose
    ``squares`` [tiles, T] float32 are as in :class:`HalfNorm`. ``split_sums`` [splits, T, D] float32 is where splits of
    the product leave their sums, if there are several, and ``counters`` are as in :class:`NextNorm`."""

    residual: torch.Tensor
    weight: torch.Tensor
    squares: torch.Tensor
    split_sums: torch.Tensor | None
    counters: torch.Tensor


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, centred: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x / rms(x) * weight over the last dimension. x [..., D], weight [D] -> [..., D] (or `out`, which may be x).

    As Hugging Face's Llama: the norm is taken in float32, rounded to x's dtype, then multiplied by the weight. With a
    weight in float32, as its Gemma: rounded after that.
    ``centred``: the mean is taken off first, which makes it a layer norm. ``bias`` [D], in the weight's format, is
    added to that before it is rounded to x's.
    """
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    product = weight * normed.to(weight.dtype)
    result = (product if bias is None else product + bias).to(x.dtype)
    return result if out is None else out.copy_(result)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0, *,
    centred: bool = False, bias: torch.Tensor | None = None, rounded: torch.dtype | None = None,
) -> torch.Tensor | RoundedTokens:  # fmt: skip
    """residual += x * scale (in place), then rms_norm(residual). residual [T, D], weight [D] -> [T, D].

    x is [T, D], or float32 [S, T, D], whose sum over S is rounded to the residual's dtype first; so is the product with
    the scale. ``rounded``: the norm is rounded further to this format of 8 bits.
    """
    whole = x if x.dim() == 2 else x.sum(0).to(residual.dtype)
    residual += whole if scale == 1.0 else whole * scale
    return rounded_reference(rms_norm_reference(residual, weight, eps, centred=centred, bias=bias), rounded)


def add_sum(x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> None:
    """As `add_rms_norm_reference`, without the norm."""
    whole = x if x.dim() == 2 else x.sum(0).to(residual.dtype)
    residual.add_(whole if scale == 1.0 else whole * scale)


@triton.jit
def norm_rows(x, weight, eps, SIZE: tl.constexpr):
    """RMS norm of rows [R, BLOCK] with a weight [BLOCK], not yet rounded: float32."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = wide * scale[:, None]
    if weight.dtype != tl.float32:
        normed = normed.to(x.dtype).to(tl.float32)
    return normed * weight[None, :].to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,  # [outer, INNER, D]; with PARTS > 1 float32 [PARTS, outer, INNER, D]
    residual_ptr,  # [outer, D] or None: then x is added to it first
    weight_ptr,  # [D]
    bias_ptr,  # [D] or None
    out_ptr,  # [outer, INNER, D]
    scale_ptr,  # None, or [outer] if out is rounded to 8 bits; there is a residual then
    stride_x_part,
    stride_x_outer,
    stride_x_inner,
    stride_residual,
    stride_out_outer,
    stride_out_inner,
    num_rows,  # outer * INNER
    eps,
    factor,  # of x, if SCALED
    INNER: tl.constexpr,
    SIZE: tl.constexpr,  # D
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # D rounded up
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,  # PARTS rounded up
    SCALED: tl.constexpr,
    CENTRED: tl.constexpr,
    LARGEST: tl.constexpr,  # of the format of 8 bits
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # that has whole numbers
    PDL: tl.constexpr,
):
    TYPE: tl.constexpr = (out_ptr if scale_ptr is None else residual_ptr).dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outer, inner = (row // INNER).to(tl.int64)[:, None], (row % INNER)[:, None]
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = x_ptr + outer * stride_x_outer + inner * stride_x_inner + column[None, :]
    if PARTS == 1:
        x = tl.load(place, mask=mask, other=0.0)
    else:  # all in one load: added up one after the other, they would wait for each other
        tl.static_assert(BLOCK_ROWS == 1)
        part = tl.arange(0, PARTS_BLOCK)[:, None]
        parts = tl.load(place + part * stride_x_part, mask=mask & (part < PARTS), other=0.0)
        x = tl.sum(parts, axis=0)[None, :]
    x = x.to(TYPE)
    if SCALED:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    if residual_ptr is not None:
        residual = residual_ptr + outer * stride_residual + column[None, :]
        x = (x.to(tl.float32) + tl.load(residual, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual, x, mask=mask)
    if CENTRED:
        wide = x.to(tl.float32)
        wide = tl.where(mask, wide - (tl.sum(wide, axis=1) / SIZE)[:, None], 0.0)
        normed = norm_rows(wide, weight, eps, SIZE)
    else:
        normed = norm_rows(x, weight, eps, SIZE)
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    if scale_ptr is not None:
        normed, scale = round_rows(normed.to(TYPE).to(tl.float32), LARGEST, LEAST, WHOLE)
        tl.store(scale_ptr + row, scale, mask=row < num_rows)
    out = out_ptr + outer * stride_out_outer + inner * stride_out_inner + column[None, :]
    tl.store(out, normed.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    factor: float = 1.0,
    *,
    centred: bool = False,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """x [parts, outer, inner, D], float32 if there are several parts; out [outer, inner, D]; residual [outer, D].
    ``scales`` [outer]: out is of 8 bits."""
    parts, outer, inner, size = x.shape
    _check(x, weight, out, out.dtype if scales is None or residual is None else residual.dtype)
    num_rows = outer * inner
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    block_rows = max(1, 1024 // block) if residual is None else 1
    _rms_norm_kernel[((num_rows + block_rows - 1) // block_rows,)](
        x,
        residual,
        weight,
        bias,
        out,
        scales,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        out.stride(1),
        num_rows,
        eps,
        factor,
        INNER=inner,
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        PARTS=parts,
        PARTS_BLOCK=next_power_of_2(parts),
        SCALED=factor != 1.0,
        CENTRED=centred,
        LARGEST=LARGEST.get(out.dtype, 0.0),
        LEAST=LEAST,
        WHOLE=out.dtype == torch.int8,
        num_warps=min(16, max(4, block // 512)) if parts == 1 else min(32, max(4, block // 128)),
        **pdl(out.device),
    )


def _check(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Whether the kernel reads and writes these: ``dtype`` is that of what is normed."""
    assert x.stride(3) == 1
    assert out.stride(2) == 1
    assert out.shape == x.shape[1:]
    assert weight.shape == x.shape[3:]
    assert weight.is_contiguous()
    assert weight.dtype in (dtype, torch.float32)
    assert x.dtype == (dtype if len(x) == 1 else torch.float32)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, centred: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x / rms(x) * weight over the last dimension, rounded and perhaps ``centred`` as in `rms_norm_reference`.

    x [..., D]: two or three dimensions may be strided (a view of a fused qkv), more must be contiguous; out may be x.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 2:
        views = x.unsqueeze(1), out.unsqueeze(1)
    else:
        views = (x, out) if x.dim() == 3 else (x.view(-1, 1, x.shape[-1]), out.view(-1, 1, x.shape[-1]))
    _launch(views[0].unsqueeze(0), None, weight, eps, views[1], centred=centred, bias=bias)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0, *,
    centred: bool = False, bias: torch.Tensor | None = None, rounded: torch.dtype | None = None,
) -> torch.Tensor | RoundedTokens:  # fmt: skip
    """residual += x * scale (in place), then rms_norm(residual), as `add_rms_norm_reference`."""
    assert x.dim() in (2, 3)
    assert residual.shape == x.shape[-2:]
    assert residual.stride(1) == 1
    parts = (x.unsqueeze(0) if x.dim() == 2 else x).unsqueeze(2)
    if rounded is not None:
        tokens = rounded_like(residual, rounded)
        out, scales = tokens.values.unsqueeze(1), tokens.scale
        _launch(parts, residual, weight, eps, out, scale, centred=centred, bias=bias, scales=scales)
        return tokens
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    _launch(parts, residual, weight, eps, out.unsqueeze(1), scale, centred=centred, bias=bias)
    return out
