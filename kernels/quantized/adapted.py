"""Products with weights that may be quantized, and with what adapters add to them, for each token its own.

What adapters add to the product of a quantized weight, a launch of its own adds in place, in the tokens' own format:
adapters never read tokens that were rounded to 8 bits. `pagebus.kernels.linear.adapted` has the products of dense ones.
"""

from __future__ import annotations

import torch

from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear import adapted as dense_products
from pagebus.kernels.linear.activation import activation_mul
from pagebus.kernels.linear.linear import whole_norm
from pagebus.kernels.lora.expand import expand
from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import DECODE_TOKENS, AdapterPlan
from pagebus.kernels.lora.shrink import shrink
from pagebus.kernels.quantized.layouts import Weight
from pagebus.kernels.quantized.products import dense_of, linear, linear_invariant


def adapted_linear_reference(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan
) -> torch.Tensor:
    """x [T, K] times ``weight`` [N, K] transposed, plus bias [N] and what the adapters of ``plan`` add -> [T, N]."""
    return dense_products.adapted_linear_reference(x, _dense(x, weight), bias, table, plan)


def adapted_gated_linear_reference(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan,
    act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    """act(gate) * up of that sum, gate | up: x [T, K], weight [2I, K] -> [T, I]."""
    return dense_products.adapted_gated_linear_reference(x, _dense(x, weight), bias, table, plan, act)


def adapted_partial_linear_reference(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None, norm: NextNorm | None,
    table: PagedTable, plan: AdapterPlan,
) -> torch.Tensor | HalfNorm | None:  # fmt: skip
    """The sum as `pagebus.kernels.linear.linear.partial_linear` gives a product; here it is [T, N]."""
    return dense_products.adapted_partial_linear_reference(x, _dense(x, weight), bias, residual, norm, table, plan)


def adapted_linear(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan
) -> torch.Tensor:
    """x [T, K] times ``weight`` [N, K] transposed, plus bias [N] and what the adapters of ``plan`` add -> [T, N]."""
    if isinstance(weight, torch.Tensor):
        return dense_products.adapted_linear(x, weight, bias, table, plan)
    x = whole_norm(x)
    return expand(shrink(x, table, plan), table, plan, linear(x, weight, bias))


def adapted_gated_linear(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan,
    act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    """act(gate) * up of that sum, gate | up: x [T, K], weight [2I, K] -> [T, I]."""
    if isinstance(weight, torch.Tensor):
        return dense_products.adapted_gated_linear(x, weight, bias, table, plan, act=act)
    x = whole_norm(x)
    return dense_products.activated(shrink(x, table, plan), table, plan, linear(x, weight, bias), act)


def adapted_partial_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None, norm: NextNorm | None,
    table: PagedTable, plan: AdapterPlan,
) -> torch.Tensor | HalfNorm | None:  # fmt: skip
    """The sum as `pagebus.kernels.linear.linear.partial_linear` gives a product; of a quantized weight it is [T, N]."""
    if isinstance(weight, torch.Tensor):
        return dense_products.adapted_partial_linear(x, weight, bias, residual, norm, table, plan)
    return adapted_linear(x, weight, bias, table, plan)


def adapted_linear_invariant(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan
) -> torch.Tensor:
    """`adapted_linear` with results independent of other tokens. Segments are those of decodes, whatever the pass."""
    if isinstance(weight, torch.Tensor):
        return dense_products.adapted_linear_invariant(x, weight, bias, table, plan)
    assert plan.tokens == DECODE_TOKENS
    assert isinstance(x, torch.Tensor)  # invariant products leave no halves
    return expand(shrink(x, table, plan), table, plan, linear_invariant(x, weight, bias))


def adapted_gated_linear_invariant(
    x: torch.Tensor | HalfNorm, weight: Weight, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan,
    act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    """`adapted_gated_linear` with results independent of other tokens."""
    return activation_mul(adapted_linear_invariant(x, weight, bias, table, plan), act)


def adapted_partial_linear_invariant(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None, norm: NextNorm | None,
    table: PagedTable, plan: AdapterPlan,
) -> torch.Tensor | HalfNorm | None:  # fmt: skip
    """`adapted_partial_linear` with results independent of other tokens."""
    return adapted_linear_invariant(x, weight, bias, table, plan)


def _dense(x: torch.Tensor | HalfNorm, weight: Weight) -> torch.Tensor:
    return dense_of(weight, (x.x if isinstance(x, HalfNorm) else x).dtype)
