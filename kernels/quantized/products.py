"""Products with weights that may be quantized. The references multiply by the dequantized weight.

There are no kernels yet that read the layouts: on a GPU the functions without ``_reference`` take dense weights only,
and executors refuse quantized models there before they load them.
"""

from __future__ import annotations

import torch

from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear import linear as dense_products
from pagebus.kernels.quantized.layouts import Weight


def dense_of(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight itself, or what the quantized one means, in ``dtype``."""
    return weight if isinstance(weight, torch.Tensor) else weight.dense(dtype)


def linear_reference(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] times ``weight`` [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x."""
    return dense_products.linear_reference(x, dense_of(weight, _dtype(x)), bias, dtype)


def gated_linear_reference(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None = None, act: str = "silu"
) -> torch.Tensor:
    """act(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]."""
    return dense_products.gated_linear_reference(x, dense_of(weight, _dtype(x)), bias, act)


def partial_linear_reference(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """The product as `add_rms_norm` takes it."""
    return dense_products.partial_linear_reference(x, dense_of(weight, x.dtype), bias, residual, norm)


def _dtype(x: torch.Tensor | HalfNorm) -> torch.dtype:
    return x.x.dtype if isinstance(x, HalfNorm) else x.dtype


def _dense(weight: Weight) -> torch.Tensor:
    """What kernels take so far."""
    if not isinstance(weight, torch.Tensor):
        raise NotImplementedError(f"no kernel multiplies by {type(weight).__name__}")
    return weight


def linear(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] times ``weight`` [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x."""
    return dense_products.linear(x, _dense(weight), bias, dtype)


def gated_linear(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None = None, act: str = "silu"
) -> torch.Tensor:
    """act(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]."""
    return dense_products.gated_linear(x, _dense(weight), bias, act=act)


def partial_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """The product as `add_rms_norm` takes it, or added to ``residual``."""
    return dense_products.partial_linear(x, _dense(weight), bias, residual, norm)


def linear_invariant(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`linear` with results independent of other tokens."""
    return dense_products.linear_invariant(x, _dense(weight), bias, dtype)


def gated_linear_invariant(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None = None, act: str = "silu"
) -> torch.Tensor:
    """`gated_linear` with results independent of other tokens."""
    return dense_products.gated_linear_invariant(x, _dense(weight), bias, act)


def partial_linear_invariant(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """`partial_linear` with results independent of other tokens."""
    return dense_products.partial_linear_invariant(x, _dense(weight), bias, residual, norm)
