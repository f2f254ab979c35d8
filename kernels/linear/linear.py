"""Products with weights, y = x Wᵀ: our own kernels where they are faster, for few tokens, and the library otherwise.

The faster kernel and its launch shape were measured for each shape; `pagebus.kernels.linear.dispatch` holds the
results. There are five forms: the product; the product in float32; act(gate) * up; partial sums, which
`pagebus.kernels.layers.norm.add_rms_norm` adds up; and the product into the residual, which computes half of the
following norm. The first three compute the other half. Forms ending in ``_invariant`` give a token the same bits
whatever other tokens are in the pass, at any cost. With a given launch shape, weights may be quantized:
`pagebus.kernels.quantized.products` chooses for these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pagebus.kernels.coded.rounding import RoundedTokens
from pagebus.kernels.coded.weights import Coded, numbers_of, shape_of
from pagebus.kernels.common.target import target_of
from pagebus.kernels.cublas.product import library_linear
from pagebus.kernels.layers.norm import Addition, HalfNorm, NextNorm
from pagebus.kernels.linear.activation import GATES, activation_mul, activation_mul_reference
from pagebus.kernels.linear.dispatch import (
    LinearChoice,
    choose_product,
    choose_residual_product,
    invariant_config,
)
from pagebus.kernels.linear.gemv import VectorConfig, vector_linear
from pagebus.kernels.linear.library_parts import LibraryConfig, library_parts, library_rows
from pagebus.kernels.linear.shapes import Config, LinearKernel, kernel_of, whole
from pagebus.kernels.linear.skinny_gemm import tiles_linear
from pagebus.kernels.lora.expand import Expansion
from pagebus.kernels.specialized.hopper_few import FewConfig, few_linear
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig, specialized_linear
from pagebus.kernels.specialized.hopper_prompts import PromptConfig, prompt_linear
from pagebus.kernels.specialized.hopper_words import WideningConfig, widened_linear
from pagebus.kernels.specialized.split_sums import add_splits

LAUNCHES: dict[LinearKernel, Callable[..., torch.Tensor]] = {
    LinearKernel.GEMV: vector_linear,
    LinearKernel.SKINNY_GEMM: tiles_linear,
    LinearKernel.HOPPER_GEMM: specialized_linear,
    LinearKernel.HOPPER_WORDS: widened_linear,
    LinearKernel.HOPPER_FEW: few_linear,
    LinearKernel.HOPPER_PROMPTS: prompt_linear,
    LinearKernel.CUBLAS_PARTS: library_parts,
}
"""Our own kernels, and the library's product in parts."""


def linear_reference(
    x: torch.Tensor | HalfNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x."""
    product = F.linear(whole_norm(x), weight, bias)
    return product if dtype is None else product.to(dtype)


def gated_linear_reference(
    x: torch.Tensor | HalfNorm, weight: torch.Tensor, bias: torch.Tensor | None = None, act: str = "silu"
) -> torch.Tensor:
    """act(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]; ``act`` one of
    `GATES`."""
    return activation_mul_reference(F.linear(whole_norm(x), weight, bias), act)


def whole_norm(x: torch.Tensor | HalfNorm) -> torch.Tensor:
    """Half a norm divided by its root mean square."""
    if not isinstance(x, HalfNorm):
        return x
    inverse = torch.rsqrt(x.squares.sum(0) / x.x.shape[1] + x.eps)
    return (x.x * inverse.unsqueeze(1)).to(x.x.dtype)


def partial_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """The product as `add_rms_norm` takes it: [T, N], or float32 [S, T, N] whose sum over S it is; or None, if it has
    been added to ``residual`` [T, N] already, or that and half of the ``norm`` that follows: kernels do so
    where it saves time."""
    return F.linear(x, weight, bias)


def residual_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: NextNorm,
) -> HalfNorm:
    """residual [T, N] += x [T, K] times weight [N, K] transposed, plus bias [N], rounded once; half the ``norm`` of
    that."""
    residual.copy_(residual.float() + F.linear(x, weight, bias).float())
    return HalfNorm(residual * norm.weight, residual.float().pow(2).sum(1).unsqueeze(0), norm.eps)


def _values(x: torch.Tensor | HalfNorm | RoundedTokens) -> torch.Tensor:
    if isinstance(x, HalfNorm):
        return x.x
    return x.values if isinstance(x, RoundedTokens) else x


def _dtype(x: torch.Tensor | HalfNorm | RoundedTokens) -> torch.dtype:
    """Of a product."""
    return x.x.dtype if isinstance(x, HalfNorm) else x.dtype


def _run(
    x: torch.Tensor | HalfNorm | RoundedTokens,
    weight: torch.Tensor | Coded,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    gated: int = 0,
    after: Addition | None = None,
    expansion: Expansion | None = None,
) -> torch.Tensor:
    values, before = (x.x, x) if isinstance(x, HalfNorm) else (x, None)
    assert _values(x).stride(1) == 1
    assert numbers_of(weight).is_contiguous()
    assert bias is None or bias.is_contiguous()
    more: dict[str, Any] = {} if before is None and after is None else {"before": before, "after": after}
    if expansion is not None:
        more["expansion"] = expansion
    return LAUNCHES[kernel_of(config)](values, weight, bias, out, config, gated=gated, **more)


def chosen_config(form: str, x: torch.Tensor | HalfNorm, weight: torch.Tensor | Coded) -> Config | None:
    """The launch shape of our own kernel; None: the library is faster. That completes no norms."""
    half_normed = isinstance(x, HalfNorm)
    values = x.x if isinstance(x, HalfNorm) else x
    target = target_of(values.device)
    assert isinstance(weight, torch.Tensor)  # quantized ones have been chosen for
    size = len(weight), weight.shape[1]
    return choose_product(form, len(values), size[0], size[1], values.dtype, target, half_normed=half_normed).config


def linear(
    x: torch.Tensor | HalfNorm | RoundedTokens,
    weight: torch.Tensor | Coded,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
    expansion: Expansion | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x.
    With a launch shape of tiles or vectors, ``expansion`` is what adapters add, here and below."""
    values, wide = _values(x), dtype == torch.float32 and _dtype(x) != torch.float32
    if config is None:
        assert not isinstance(x, RoundedTokens)
        config = chosen_config("wide" if wide else "plain", x, weight)
    if config is None:
        assert isinstance(x, torch.Tensor)
        assert isinstance(weight, torch.Tensor)
        if wide and bias is None and target_of(x.device) is not None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        product = library_linear(x, weight, bias)
        return product if dtype is None else product.to(dtype)
    out = torch.empty((len(values), shape_of(weight)[0]), dtype=dtype or _dtype(x), device=values.device)
    if isinstance(config, WideningConfig) and config.splits > 1:
        sums = torch.empty((config.splits, *out.shape), dtype=torch.float32, device=values.device)
        return add_splits(_run(x, weight, None, sums, config), bias, out)
    return _run(x, weight, bias, out, config, expansion=expansion)


def gated_linear(
    x: torch.Tensor | HalfNorm | RoundedTokens,
    weight: torch.Tensor | Coded,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
    act: str = "silu",
    expansion: Expansion | None = None,
) -> torch.Tensor:
    """act(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]; ``act`` one of
    `GATES`."""
    if config is None:
        assert not isinstance(x, RoundedTokens)
        config = chosen_config("gated", x, weight)
    if config is None:
        assert isinstance(x, torch.Tensor)
        assert isinstance(weight, torch.Tensor)
        return activation_mul(library_linear(x, weight, bias), act)
    if isinstance(config, LibraryConfig):
        return _gated_in_two(x, weight, bias, config, act)
    values = _values(x)
    out = torch.empty((len(values), shape_of(weight)[0] // 2), dtype=_dtype(x), device=values.device)
    return _run(x, weight, bias, out, config, gated=GATES[act], expansion=expansion)


def _gated_in_two(
    x: torch.Tensor | HalfNorm | RoundedTokens, weight: torch.Tensor | Coded, bias: torch.Tensor | None,
    config: LibraryConfig, act: str,
) -> torch.Tensor:  # fmt: skip
    """By the library; with a bias all rows at once."""
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    both = library_linear(x, weight, bias) if bias is not None else library_rows(x, weight, config.first)
    return activation_mul(both, act)


def partial_linear(
    x: torch.Tensor | RoundedTokens,
    weight: torch.Tensor | Coded,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
    config: Config | None = None,
    expansion: Expansion | None = None,
) -> torch.Tensor | HalfNorm | None:
    """The product as `add_rms_norm` takes it: [T, N], or float32 [S, T, N] whose sum over S it is; or None, if it has
    been added to ``residual`` [T, N] already; or that, and half of the ``norm`` of the sum. What is added here is
    rounded once, not twice."""
    if config is not None:
        return _partial(x, weight, bias, config, expansion)
    assert isinstance(weight, torch.Tensor)
    assert isinstance(x, torch.Tensor)
    chosen = chosen_for_residual(x, weight, bias, residual, norm)
    if chosen.form == "residual":
        assert residual is not None
        assert norm is not None
        assert chosen.config is not None
        return residual_linear(x, weight, bias, residual, norm, chosen.config)
    if chosen.form == "added":
        assert residual is not None
        residual.addmm_(x, weight.t())
        return None
    return library_linear(x, weight, bias) if chosen.config is None else _partial(x, weight, bias, chosen.config)


def chosen_for_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    norm: NextNorm | None,
) -> LinearChoice:  # fmt: skip
    return choose_residual_product(
        len(x), len(weight), weight.shape[1], x.dtype, target_of(x.device),
        biased=bias is not None, adds=residual is not None, norms=norm is not None,
    )  # fmt: skip


def _partial(
    x: torch.Tensor | RoundedTokens, weight: torch.Tensor | Coded, bias: torch.Tensor | None, config: Config,
    expansion: Expansion | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product, or partial sums of it."""
    if isinstance(config, VectorConfig | FewConfig) or config.splits == 1:
        return linear(x, weight, bias, config=config, expansion=expansion)
    if bias is not None:
        one = config if isinstance(config, WideningConfig) else whole(config)
        return linear(x, weight, bias, config=one, expansion=expansion)
    values = _values(x)
    out = torch.empty((config.splits, len(values), shape_of(weight)[0]), dtype=torch.float32, device=values.device)
    return _run(x, weight, None, out, config, expansion=expansion)


def residual_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Coded,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: NextNorm,
    config: Config,
    expansion: Expansion | None = None,
) -> HalfNorm:
    """residual [T, N] += x [T, K] times weight [N, K] transposed, plus bias [N], rounded once; half the ``norm`` of
    that."""
    assert residual.is_contiguous()
    assert not isinstance(config, SpecializedConfig | WideningConfig | PromptConfig | LibraryConfig)
    out = torch.empty_like(residual)
    squares = torch.empty((config.tiles(shape_of(weight)[0]), len(x)), dtype=torch.float32, device=x.device)
    split_sums, splits = None, 1 if isinstance(config, VectorConfig | FewConfig) else config.splits
    if splits > 1:
        split_sums = torch.empty((splits, *residual.shape), dtype=torch.float32, device=x.device)
    after = Addition(residual, norm.weight, squares, split_sums, norm.counters)
    _run(x, weight, bias, out, config, after=after, expansion=expansion)
    return HalfNorm(out, squares, norm.eps)


def linear_invariant(
    x: torch.Tensor | HalfNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`linear` with results independent of other tokens."""
    return linear(x, weight, bias, dtype, config=_invariant_config(x))


def gated_linear_invariant(
    x: torch.Tensor | HalfNorm, weight: torch.Tensor, bias: torch.Tensor | None = None, act: str = "silu"
) -> torch.Tensor:
    """`gated_linear` with results independent of other tokens."""
    return gated_linear(x, weight, bias, config=_invariant_config(x), act=act)


def _invariant_config(x: torch.Tensor | HalfNorm) -> Config:
    values = x.x if isinstance(x, HalfNorm) else x
    return invariant_config(len(values), values.dtype)


def partial_linear_invariant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """`partial_linear` with results independent of other tokens."""
    return partial_linear(x, weight, bias, config=_invariant_config(x))
