"""Products with weights, y = x Wᵀ: of few tokens by our own kernels where these are faster, else by the library.

Which is faster for a shape, and with which launch shape, was measured; `kernels.linear_choice` keeps that. There are
four forms: the product, the same in float32, silu(gate) * up of it, and partial sums of it, which
`kernels.norm.add_rms_norm` adds up.
The forms ending in ``_invariant`` give a token the same bits whatever other tokens there are in the pass, at any cost.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from kernels.activation import silu_mul, silu_mul_reference
from kernels.linear_choice import BUCKETS, Config, choose, invariant_config
from kernels.linear_specialized import SpecializedConfig, specialized_linear
from kernels.linear_tiles import TileConfig, tiles_linear
from kernels.linear_vector import VectorConfig, vector_linear
from kernels.target import target_of

LAUNCHES = {TileConfig: tiles_linear, VectorConfig: vector_linear, SpecializedConfig: specialized_linear}


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x."""
    product = F.linear(x, weight, bias)
    return product if dtype is None else product.to(dtype)


def gated_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]."""
    return silu_mul_reference(F.linear(x, weight, bias))


def partial_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The product as `add_rms_norm` takes it: [T, N], or float32 [S, T, N] whose sum over S it is; or None, if it has
    been added to ``residual`` [T, N] already, which kernels do where it saves time."""
    return F.linear(x, weight, bias)


def _run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, config: Config, gated: bool
) -> torch.Tensor:
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    return LAUNCHES[type(config)](x, weight, bias, out, config, gated=gated)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x."""
    wide = dtype == torch.float32 and x.dtype != torch.float32
    config = config or choose("wide" if wide else "plain", x, weight)
    if config is None:
        if wide and bias is None and target_of(x.device) is not None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return linear_reference(x, weight, bias, dtype)
    out = torch.empty((len(x), len(weight)), dtype=dtype or x.dtype, device=x.device)
    return _run(x, weight, bias, out, config, gated=False)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, config: Config | None = None
) -> torch.Tensor:
    """silu(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]."""
    config = config or choose("gated", x, weight)
    if config is None:
        return silu_mul(F.linear(x, weight, bias))
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    return _run(x, weight, bias, out, config, gated=True)


def partial_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | None:
    """The product as `add_rms_norm` takes it: [T, N], or float32 [S, T, N] whose sum over S it is; or None, if it has
    been added to ``residual`` [T, N] already. Then the sum is rounded once, not twice."""
    config = config or choose("partial", x, weight)
    if config is None and bias is None and residual is not None and _adds(x):
        residual.addmm_(x, weight.t())
        return None
    if config is None:
        return F.linear(x, weight, bias)
    if not isinstance(config, VectorConfig) and config.splits > 1:
        if bias is None:
            out = torch.empty((config.splits, len(x), len(weight)), dtype=torch.float32, device=x.device)
            return _run(x, weight, None, out, config, gated=False)
        config = replace(config, splits=1)
    return linear(x, weight, bias, config=config)


def _adds(x: torch.Tensor) -> bool:
    """Whether the library adds x's product to a residual itself: of many tokens this costs it nothing."""
    return target_of(x.device) is not None and len(x) > BUCKETS[-1] and x.dtype.itemsize == 2


def linear_invariant(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`linear`, of each token alone."""
    return linear(x, weight, bias, dtype, config=invariant_config(x, weight))


def gated_linear_invariant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`gated_linear`, of each token alone."""
    return gated_linear(x, weight, bias, config=invariant_config(x, weight))


def partial_linear_invariant(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`partial_linear`, of each token alone."""
    return partial_linear(x, weight, bias, config=invariant_config(x, weight))
