"""Products of quantized weights by libraries, in pieces, so that scratch memory stays small."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagebus.kernels.coded.rounding import RoundedTokens, round_tokens, scale_sums
from pagebus.kernels.common.target import target_of
from pagebus.kernels.linear.linear import gated_linear, linear_invariant
from pagebus.kernels.linear.shapes import LinearKernel, Product
from pagebus.kernels.quantized.dequantize import dequantize
from pagebus.kernels.quantized.layouts import Layout, W8Rows
from pagebus.kernels.specialized.hopper_prompts import PromptConfig

SCRATCH_BYTES, PROMPTS_SCRATCH_BYTES = 64 << 20, 256 << 20
"""Size of the scratch, of dequantized rows or of int32 sums; and of all gates and ups for our kernel of prompts, at
most: in pieces its last tiles would leave multiprocessors idle."""
ALIGNED = 16
"""The rows of a piece are a multiple of this."""


def library_product(
    kernel: LinearKernel, x: torch.Tensor | RoundedTokens, weight: Layout, bias: torch.Tensor | None,
    dtype: torch.dtype | None, *, invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [T, K] times ``weight`` [N, K], whose columns are in their stored order, plus bias [N] -> [T, N] of ``dtype``,
    by default that of x. ``invariant``: a token's result does not depend on others. Tokens that are rounded already are
    for products of 8 bits."""
    dtype, given = dtype or x.dtype, x.values if isinstance(x, RoundedTokens) else x
    if len(given) == 0:
        return torch.empty((0, weight.shape[-2]), dtype=dtype, device=given.device)
    if isinstance(x, RoundedTokens):
        return (_scaled if kernel is LinearKernel.SCALED_MM else _whole)(x, weight, bias, dtype)
    if kernel is LinearKernel.SCALED_MM:
        return _scaled(RoundedTokens(*round_tokens(x, torch.float8_e4m3fn), x.dtype), weight, bias, dtype)
    if kernel is LinearKernel.INT_MM:
        return _whole(RoundedTokens(*round_tokens(x, torch.int8), x.dtype), weight, bias, dtype)
    return _dequantized(x, weight, bias, dtype, invariant=invariant)


def fits_scratch(product: Product) -> bool:
    """Whether all rows may be dequantized at once, for prompts."""
    return 2 * product.rows * product.inputs <= PROMPTS_SCRATCH_BYTES


def prompt_product(
    x: torch.Tensor, weight: Layout, bias: torch.Tensor | None, act: str, config: PromptConfig
) -> torch.Tensor:
    """act(gate) * up of the dequantized weight, by our kernel of prompts."""
    dense = dequantize(weight, torch.empty(weight.shape, dtype=x.dtype, device=x.device), 0)
    return gated_linear(x, dense, bias, config=config, act=act)


def pieces(rows: int, bytes_of_row: int) -> Iterator[tuple[int, int]]:
    """Start and stop of pieces of ``rows`` that fit into the scratch, or of ALIGNED rows."""
    step = max(ALIGNED, SCRATCH_BYTES // bytes_of_row // ALIGNED * ALIGNED)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _dequantized(
    x: torch.Tensor, weight: Layout, bias: torch.Tensor | None, dtype: torch.dtype, *, invariant: bool
) -> torch.Tensor:
    """Dequantized rows times x, which is not rounded."""
    rows, columns = weight.shape[-2:]
    out = torch.empty((len(x), rows), dtype=dtype, device=x.device)
    for start, stop in pieces(rows, columns * x.itemsize):
        dense = dequantize(weight, torch.empty((stop - start, columns), dtype=x.dtype, device=x.device), start)
        _multiply(x, dense, None if bias is None else bias[start:stop], out[:, start:stop], invariant=invariant)
    return out


def _multiply(
    x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, invariant: bool
) -> None:
    """Write the product into ``out`` [T, n], a part of wider rows. Our kernels that read weights before they wait for
    the previous kernel must not be used: that kernel has just written the weights."""
    if invariant:
        out.copy_(linear_invariant(x, dense, bias, out.dtype))
    elif out.dtype != x.dtype:
        product = torch.mm(x, dense.t(), out_dtype=out.dtype) if target_of(x.device) else torch.mm(x, dense.t())
        out.copy_(product if bias is None else product + bias)
    elif bias is None:
        torch.mm(x, dense.t(), out=out)
    else:
        torch.addmm(bias, x, dense.t(), out=out)


def _scaled(x: RoundedTokens, weight: Layout, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x, rounded to float8_e4m3fn, times weights of the same format."""
    assert isinstance(weight, W8Rows)
    product: torch.Tensor = torch._scaled_mm(
        x.values, weight.values.t(), scale_a=x.scale, scale_b=weight.scale.unsqueeze(0), bias=bias, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return product


def _whole(x: RoundedTokens, weight: Layout, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x, rounded to int8, times weights of int8. The library's sums are int32, and are scaled afterwards."""
    assert isinstance(weight, W8Rows)
    rounded, scale, _ = x
    out = torch.empty((len(rounded), len(weight.values)), dtype=dtype, device=rounded.device)
    for start, stop in pieces(len(weight.values), 4 * len(rounded)):
        sums = torch._int_mm(rounded, weight.values[start:stop].t())
        piece = None if bias is None else bias[start:stop]
        scale_sums(sums, scale, weight.scale[start:stop], piece, out[:, start:stop])
    return out
