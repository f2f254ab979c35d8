"""Products with weights that may be quantized. The references multiply by the dequantized weight.

`pagebus.kernels.quantized.choice` chooses for quantized weights, `pagebus.kernels.linear.dispatch` for dense ones. Of a
weight whose columns are in an order of their own, the inputs are put into that order first.
"""

from __future__ import annotations

import torch

from pagebus.kernels.coded.rounding import RoundedTokens, round_tokens, rounded_reference
from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import target_of
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear import linear as dense_products
from pagebus.kernels.linear.activation import activation_mul, rounded_activation_mul
from pagebus.kernels.linear.dispatch import LinearChoice
from pagebus.kernels.linear.shapes import Config, LinearKernel
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.choice import (
    choose_quantized,
    choose_quantized_invariant,
    choose_quantized_residual,
)
from pagebus.kernels.quantized.coding import Kind, coded_of, kind_of
from pagebus.kernels.quantized.layouts import Layout, W8Rows, Weight
from pagebus.kernels.quantized.library import library_product, prompt_product
from pagebus.kernels.specialized.hopper_prompts import PromptConfig

Inputs = torch.Tensor | HalfNorm | RoundedTokens
ROUNDING = {LinearKernel.SCALED_MM: torch.float8_e4m3fn, LinearKernel.INT_MM: torch.int8}
"""The format to which products of the library round tokens, each with one scale."""


def dense_of(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight itself, or what the quantized one means, in ``dtype``."""
    return weight if isinstance(weight, torch.Tensor) else weight.dense(dtype)


def linear_reference(
    x: Inputs, weight: Weight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] times ``weight`` [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x."""
    return dense_products.linear_reference(_exact(x), dense_of(weight, _dtype(x)), bias, dtype)


def gated_linear_reference(
    x: Inputs, weight: Weight, bias: torch.Tensor | None = None, act: str = "silu", rounded: torch.dtype | None = None
) -> torch.Tensor | RoundedTokens:
    """act(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]; perhaps ``rounded`` to
    this format of 8 bits."""
    product = dense_products.gated_linear_reference(_exact(x), dense_of(weight, _dtype(x)), bias, act)
    return rounded_reference(product, rounded)


def partial_linear_reference(
    x: torch.Tensor | RoundedTokens,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """The product as `add_rms_norm` takes it."""
    exact = x.exact if isinstance(x, RoundedTokens) else x
    return dense_products.partial_linear_reference(exact, dense_of(weight, x.dtype), bias, residual, norm)


def _values(x: Inputs) -> torch.Tensor:
    if isinstance(x, RoundedTokens):
        return x.values
    return x.x if isinstance(x, HalfNorm) else x


def _dtype(x: Inputs) -> torch.dtype:
    """That of its products."""
    return x.dtype if isinstance(x, RoundedTokens) else _values(x).dtype


def _exact(x: Inputs) -> torch.Tensor | HalfNorm:
    return x.exact if isinstance(x, RoundedTokens) else x


def rounding_of(x: Inputs, weight: Weight, form: str) -> torch.dtype | None:
    """The format to which inputs of a product of this ``form`` may be rounded where they are made, of as many tokens
    as x [T, ...] has; None: they may not."""
    if isinstance(weight, torch.Tensor):
        return None
    rows, inputs = weight.shape
    values, kind = _values(x), kind_of(weight)
    choice = choose_quantized(form, len(values), rows, inputs, kind, _dtype(x), target_of(values.device))
    if kind is not None and _rounds_rows(choice, kind):
        return torch.int8 if kind.code == Code.INT8 else torch.float8_e4m3fn
    return ROUNDING.get(choice.kernel)


def _rounds_rows(choice: LinearChoice, kind: Kind) -> bool:
    """Whether tiles multiply tokens that are rounded with one scale each."""
    return isinstance(choice.config, TileConfig) and choice.config.rounded and not kind.width


def never_rounded(x: Inputs, weight: Weight, form: str) -> torch.dtype | None:
    """`rounding_of` where no activation is rounded: on a CPU, and with ``--deterministic``."""
    return None


def _in_order(x: Inputs, weight: Layout) -> Inputs:
    """The inputs as the weight's columns are stored."""
    if isinstance(weight, W8Rows) or weight.order is None:
        return x
    assert not isinstance(x, RoundedTokens)
    values = _values(x).index_select(1, weight.order)
    return x._replace(x=values) if isinstance(x, HalfNorm) else values


def _choose(form: str, x: Inputs, weight: Layout, *, invariant: bool) -> LinearChoice:
    values, kind = _values(x), kind_of(weight)
    target = target_of(values.device)
    if invariant:
        return choose_quantized_invariant(form, len(values), kind, values.dtype, target)
    rows, inputs = weight.shape
    half_normed = isinstance(x, HalfNorm)
    return choose_quantized(form, len(values), rows, inputs, kind, _dtype(x), target, half_normed=half_normed)


def _product(
    choice: LinearChoice, x: Inputs, weight: Layout, bias: torch.Tensor | None, dtype: torch.dtype | None = None, *,
    invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As was chosen; x is in the weight's order."""
    if isinstance(x, RoundedTokens) and choice.config is not None:
        coded = coded_of(weight)
        assert coded is not None
        return dense_products.linear(_as_read(x, choice.config), coded, bias, dtype, config=choice.config)
    if isinstance(x, RoundedTokens):
        kernel = next(kernel for kernel, numbers in ROUNDING.items() if numbers == x.values.dtype)
        return library_product(kernel, x, weight, bias, dtype)
    if choice.config is not None:
        coded = coded_of(weight)
        assert coded is not None
        return dense_products.linear(x, coded, bias, dtype, config=choice.config)
    whole = dense_products.whole_norm(x)
    if choice.kernel is LinearKernel.TORCH:
        product = torch.nn.functional.linear(whole, _stored(weight, whole.dtype), bias)
        return product if dtype is None else product.to(dtype)
    return library_product(choice.kernel, whole, weight, bias, dtype, invariant=invariant)


def _as_read(x: Inputs, config: Config) -> Inputs:
    """Tokens that were rounded already as they were, for a kernel that rounds none."""
    reads = isinstance(config, TileConfig) and config.rounded
    return x.exact if isinstance(x, RoundedTokens) and not reads else x


def _stored(weight: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Dense, its columns as they are stored."""
    dense = weight.dense(dtype)
    return dense if isinstance(weight, W8Rows) or weight.order is None else dense.index_select(1, weight.order)


def _linear(
    x: Inputs, weight: Layout, bias: torch.Tensor | None, dtype: torch.dtype | None, *, invariant: bool
) -> torch.Tensor:
    x, wide = _in_order(x, weight), dtype == torch.float32 and _dtype(x) != torch.float32
    choice = _choose("wide" if wide else "plain", x, weight, invariant=invariant)
    return _product(choice, x, weight, bias, dtype, invariant=invariant)


def _gated(
    x: Inputs, weight: Layout, bias: torch.Tensor | None, act: str, rounded: torch.dtype | None = None, *,
    invariant: bool,
) -> torch.Tensor | RoundedTokens:  # fmt: skip
    x = _in_order(x, weight)
    choice = _choose("gated", x, weight, invariant=invariant)
    if isinstance(choice.config, PromptConfig):
        assert isinstance(x, torch.Tensor)
        product = prompt_product(x, weight, bias, act, choice.config)
        return product if rounded is None else RoundedTokens(*round_tokens(product, rounded), product.dtype)
    if choice.config is None:
        product = _product(choice, x, weight, bias, invariant=invariant)
        return activation_mul(product, act) if rounded is None else rounded_activation_mul(product, act, rounded)
    coded = coded_of(weight)
    assert coded is not None
    return dense_products.gated_linear(_as_read(x, choice.config), coded, bias, config=choice.config, act=act)


def linear(
    x: Inputs, weight: Weight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] times ``weight`` [N, K] transposed, plus bias [N] -> [T, N] of ``dtype``, by default that of x."""
    if isinstance(weight, torch.Tensor):
        return dense_products.linear(_dense_inputs(x), weight, bias, dtype)
    return _linear(x, weight, bias, dtype, invariant=False)


def _dense_inputs(x: Inputs) -> torch.Tensor | HalfNorm:
    """Of a product that rounds none, or rounds them itself."""
    assert not isinstance(x, RoundedTokens)
    return x


def gated_linear(
    x: Inputs, weight: Weight, bias: torch.Tensor | None = None, act: str = "silu", rounded: torch.dtype | None = None
) -> torch.Tensor | RoundedTokens:
    """act(gate) * up, where gate | up = linear(x [T, K], weight [2I, K], bias [2I]) -> [T, I]; ``rounded`` to this
    format of 8 bits, where the activation is a kernel of its own."""
    if isinstance(weight, torch.Tensor):
        return dense_products.gated_linear(_dense_inputs(x), weight, bias, act=act)
    return _gated(x, weight, bias, act, rounded, invariant=False)


def partial_linear(
    x: torch.Tensor | RoundedTokens,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """The product as `add_rms_norm` takes it, or added to ``residual``."""
    if isinstance(weight, torch.Tensor):
        assert not isinstance(x, RoundedTokens)
        return dense_products.partial_linear(x, weight, bias, residual, norm)
    if isinstance(x, RoundedTokens):
        return _rounded_partial(x, weight, bias)
    inputs, coded = _values(_in_order(x, weight)), coded_of(weight)
    norms = residual is not None and norm is not None
    choice = choose_quantized_residual(
        len(inputs), weight.shape[0], weight.shape[1], kind_of(weight), inputs.dtype, target_of(inputs.device),
        biased=bias is not None, norms=norms,
    )  # fmt: skip
    if choice.config is None or coded is None:
        return _product(choice, inputs, weight, bias)
    if choice.form == "residual":
        assert residual is not None
        assert norm is not None
        return dense_products.residual_linear(inputs, coded, bias, residual, norm, choice.config)
    return dense_products.partial_linear(inputs, coded, bias, config=choice.config)


def _rounded_partial(x: RoundedTokens, weight: Layout, bias: torch.Tensor | None) -> torch.Tensor | HalfNorm | None:
    """Of tokens that were rounded where they were made, which does no norm."""
    coded, target = coded_of(weight), target_of(x.values.device)
    given = len(x.values), weight.shape[0], weight.shape[1], kind_of(weight), x.dtype, target
    choice = choose_quantized_residual(*given, biased=bias is not None, norms=False)
    if choice.config is None or coded is None:
        return _product(choice, x, weight, bias)
    inputs = _as_read(x, choice.config)
    assert not isinstance(inputs, HalfNorm)
    return dense_products.partial_linear(inputs, coded, bias, config=choice.config)


def linear_invariant(
    x: Inputs, weight: Weight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`linear` with results independent of other tokens."""
    if isinstance(weight, torch.Tensor):
        return dense_products.linear_invariant(_dense_inputs(x), weight, bias, dtype)
    return _linear(x, weight, bias, dtype, invariant=True)


def gated_linear_invariant(
    x: Inputs, weight: Weight, bias: torch.Tensor | None = None, act: str = "silu", rounded: torch.dtype | None = None
) -> torch.Tensor | RoundedTokens:
    """`gated_linear` with results independent of other tokens; never ``rounded``."""
    assert rounded is None
    if isinstance(weight, torch.Tensor):
        return dense_products.gated_linear_invariant(_dense_inputs(x), weight, bias, act)
    return _gated(x, weight, bias, act, invariant=True)


def partial_linear_invariant(
    x: torch.Tensor | RoundedTokens,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: NextNorm | None = None,
) -> torch.Tensor | HalfNorm | None:
    """`partial_linear` with results independent of other tokens."""
    if isinstance(weight, torch.Tensor):
        assert not isinstance(x, RoundedTokens)
        return dense_products.partial_linear_invariant(x, weight, bias, residual, norm)
    return _linear(x, weight, bias, None, invariant=True)
