"""Activations in 8 bits, with a scale of each token, for products of 8 bits by 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.kernels.common.int8 import round_to_int
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
GROUP = 128
"""Columns of a token that have a scale of their own, where blocks of the weight have."""
LEAST = 1e-12
"""The least number that counts as the largest of a token, so that no scale is 0."""


class RoundedTokens(NamedTuple):
    """Tokens that were rounded by what made them: ``values`` [T, K] of 8 bits times ``scale`` [T, 1] float32. Their
    products are of ``dtype``."""

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    @property
    def exact(self) -> torch.Tensor:
        """[T, K] of ``dtype``."""
        return (self.values.float() * self.scale).to(self.dtype)


def rounded_reference(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | RoundedTokens:
    """x [T, K] itself, or rounded to ``dtype``."""
    return x if dtype is None else RoundedTokens(*round_tokens_reference(x, dtype), x.dtype)


def rounded_like(x: torch.Tensor, dtype: torch.dtype) -> RoundedTokens:
    """Room for tokens as of x [T, K], contiguous, rounded to ``dtype``."""
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    return RoundedTokens(torch.empty(x.shape, dtype=dtype, device=x.device), scale, x.dtype)


def round_tokens_reference(
    x: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] rounded to int8 or float8_e4m3fn, and its scales, float32 [T, 1]. The largest number of a token becomes
    the largest of the format. ``grouped``: that of each GROUP of its columns, and scales are [T, ceil(K / GROUP)]."""
    if grouped:
        groups = [round_tokens_reference(part, dtype) for part in x.split(GROUP, 1)]
        return torch.cat([values for values, _ in groups], 1), torch.cat([scale for _, scale in groups], 1)
    wide, largest = x.float(), LARGEST[dtype]
    most = wide.abs().amax(1, keepdim=True).clamp(min=LEAST)
    divisor = torch.full_like(most, largest)  # by a number, CUDA's division is a product with its inverse
    scaled = wide * (divisor / most)
    rounded = scaled.round().clamp(-largest, largest) if dtype == torch.int8 else scaled.clamp(-largest, largest)
    return rounded.to(dtype), most / divisor


@triton.jit
def round_rows(x, LARGEST: tl.constexpr, LEAST: tl.constexpr, WHOLE: tl.constexpr):
    """x [R, W] float32 as numbers up to LARGEST, if WHOLE whole ones; and the scale of each row [R]."""
    most = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST)
    scaled = tl.clamp(x * tl.div_rn(LARGEST, most)[:, None], -LARGEST, LARGEST)
    if WHOLE:
        scaled = round_to_int(scaled)
    return scaled, tl.div_rn(most, LARGEST)


@triton.jit
def _round_tokens_kernel(
    x_ptr,  # [T, K]
    out_ptr,  # [T, K]
    scale_ptr,  # [T, GROUPS]
    stride_x,
    size,  # K
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # to whole numbers
    GROUPS: tl.constexpr,  # of columns, 1 or ceil(K / WIDTH)
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    scaled, scale = round_rows(x.reshape(BLOCK // WIDTH, WIDTH), LARGEST, LEAST, WHOLE)
    scaled = scaled.reshape(BLOCK)
    tl.store(out_ptr + token * size + column, scaled.to(out_ptr.dtype.element_ty), mask=mask)
    group = tl.arange(0, BLOCK // WIDTH)
    tl.store(scale_ptr + token * GROUPS + group, scale, mask=group < GROUPS)


def round_tokens(x: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] rounded to int8 or float8_e4m3fn, and its scales, float32 [T, 1]. The largest number of a token becomes
    the largest of the format. ``grouped``: that of each GROUP of its columns, and scales are [T, ceil(K / GROUP)]."""
    num_tokens, size = x.shape
    assert x.stride(1) == 1
    out = torch.empty((num_tokens, size), dtype=dtype, device=x.device)
    groups = -(-size // GROUP) if grouped else 1
    scale = torch.empty((num_tokens, groups), dtype=torch.float32, device=x.device)
    if num_tokens:
        block = max(GROUP, next_power_of_2(size))
        _round_tokens_kernel[(num_tokens,)](
            x, out, scale, x.stride(0), size, LARGEST=LARGEST[dtype], LEAST=LEAST, WHOLE=dtype == torch.int8,
            GROUPS=groups, WIDTH=GROUP if grouped else block, BLOCK=block, num_warps=min(16, max(4, block // 512)),
            **pdl(x.device),
        )  # fmt: skip
    return out, scale


@triton.jit
def _scale_sums_kernel(
    sums_ptr,  # [T, n] int32
    token_scale_ptr,  # [T]
    row_scale_ptr,  # [n]
    bias_ptr,  # [n] or None
    out_ptr,  # [T, n]
    stride_out,
    size,  # n
    BLOCK: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    sums = tl.load(sums_ptr + token * size + column, mask=mask, other=0).to(tl.float32)
    result = sums * (tl.load(token_scale_ptr + token) * tl.load(row_scale_ptr + column, mask=mask, other=0.0))
    if bias_ptr is not None:
        result += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + column, result.to(out_ptr.dtype.element_ty), mask=mask)


def scale_sums_reference(
    sums: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """sums [T, n] int32 times the scales of tokens [T, 1] and rows [n], plus bias [n], into ``out`` [T, n]."""
    result = sums.float() * (tokens * rows)
    return out.copy_(result if bias is None else result + bias.float())


def scale_sums(
    sums: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """sums [T, n] int32 times the scales of tokens [T, 1] and rows [n], plus bias [n], into ``out`` [T, n], whose rows
    may be apart."""
    num_tokens, size = sums.shape
    assert sums.is_contiguous()
    assert tokens.is_contiguous()
    assert rows.is_contiguous()
    assert bias is None or bias.is_contiguous()
    assert out.stride(1) == 1
    block = min(1024, next_power_of_2(size))
    _scale_sums_kernel[(num_tokens, -(-size // block))](
        sums, tokens, rows, bias, out, out.stride(0), size, BLOCK=block, num_warps=4
    )  # fmt: skip
    return out
