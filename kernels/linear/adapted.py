"""Products with weights and with what adapters add to them, for each token its own.

Of few tokens, our own kernels add the second half of it to their tiles, before activations and residuals. Of more
tokens, and behind the library, it is added in place. Which kernel multiplies is chosen as without adapters.
"""

from __future__ import annotations

import torch

from pagebus.kernels.cublas.product import library_linear
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear.activation import activation_mul, activation_mul_reference, adapted_activation_mul
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import (
    chosen_config,
    chosen_for_residual,
    gated_linear,
    linear,
    linear_invariant,
    linear_reference,
    partial_linear,
    residual_linear,
    whole_norm,
)
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.lora.expand import Expansion, expand
from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import DECODE_TOKENS, FEW_TOKENS, AdapterPlan
from pagebus.kernels.lora.reference import add_adapters_reference
from pagebus.kernels.lora.shrink import shrink
from pagebus.kernels.lora.within import within

MOST_FUSED = 64
"""Tokens of which a tile adds what adapters add, at most."""
MOST_WITHIN = {"plain": 16, "gated": 16, "partial": 32, "residual": 32}
"""Tokens of which tiles make the first half as well, at most, by the form of the product."""
FEWEST_ACTIVATED = 129
"""Of this many tokens and more, up to those of the widest steps of decodes, the activation of gates adds what adapters
add."""


def adds_in_tiles(config: Config | None, num_tokens: int) -> bool:
    """Whether a product of this launch shape (None: the library's) adds what adapters add to its tiles."""
    return isinstance(config, TileConfig | VectorConfig) and num_tokens <= MOST_FUSED


def _divided(x: torch.Tensor | HalfNorm, table: PagedTable) -> torch.Tensor | HalfNorm:
    """A sum behind which the norm divides must have no constants."""
    return whole_norm(x) if table.constants else x


def _shrunk(x: torch.Tensor | HalfNorm, table: PagedTable, plan: AdapterPlan) -> Expansion:
    """Of half a norm this is undivided as well."""
    return Expansion(shrink(x.x if isinstance(x, HalfNorm) else x, table, plan), table, plan)


def _both(
    x: torch.Tensor | HalfNorm, table: PagedTable, plan: AdapterPlan, form: str, config: Config | None
) -> Expansion:
    """What a product of this launch shape adds to its tiles. On tensor cores that of fewest tokens makes all of it."""
    values = x.x if isinstance(x, HalfNorm) else x
    both = isinstance(config, TileConfig) and len(values) <= MOST_WITHIN[form]
    given = within(values, table, plan) if both else None
    return _shrunk(x, table, plan) if given is None else given


def _behind(expansion: Expansion, y: torch.Tensor) -> torch.Tensor:
    return expand(expansion.s, expansion.table, expansion.plan, y)


def activated(s: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up of y [T, 2I] plus s B^T -> [T, I]."""
    if FEWEST_ACTIVATED <= len(y) <= FEW_TOKENS:
        return adapted_activation_mul(s, table, plan, y, act)
    return activation_mul(expand(s, table, plan, y), act)


def adapted_linear_reference(
    x: torch.Tensor | HalfNorm, weight: torch.Tensor, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] and what the adapters of ``plan`` add -> [T, N]."""
    return add_adapters_reference(whole_norm(x), table, plan, linear_reference(x, weight, bias))


def adapted_gated_linear_reference(
    x: torch.Tensor | HalfNorm, weight: torch.Tensor, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan,
    act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    """act(gate) * up of that sum, gate | up: x [T, K], weight [2I, K] -> [T, I]."""
    return activation_mul_reference(adapted_linear_reference(x, weight, bias, table, plan), act)


def adapted_partial_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    norm: NextNorm | None, table: PagedTable, plan: AdapterPlan,
) -> torch.Tensor | HalfNorm | None:  # fmt: skip
    """The sum as `pagebus.kernels.linear.linear.partial_linear` gives a product; here it is [T, N]."""
    return adapted_linear_reference(x, weight, bias, table, plan)


def adapted_linear(
    x: torch.Tensor | HalfNorm, weight: torch.Tensor, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan,
    config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, K] times weight [N, K] transposed, plus bias [N] and what the adapters of ``plan`` add -> [T, N]."""
    x = _divided(x, table)
    config = config or chosen_config("plain", x, weight)
    if adds_in_tiles(config, len(plan.of_token)):
        return linear(x, weight, bias, config=config, expansion=_both(x, table, plan, "plain", config))
    x = whole_norm(x)
    return _behind(_shrunk(x, table, plan), linear(x, weight, bias, config=config))


def adapted_gated_linear(
    x: torch.Tensor | HalfNorm, weight: torch.Tensor, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan,
    config: Config | None = None, act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    """act(gate) * up of that sum, gate | up: x [T, K], weight [2I, K] -> [T, I]."""
    x = _divided(x, table)
    config = config or chosen_config("gated", x, weight)
    if adds_in_tiles(config, len(plan.of_token)):
        return gated_linear(x, weight, bias, config=config, act=act, expansion=_both(x, table, plan, "gated", config))
    x = whole_norm(x)
    return activated(_shrunk(x, table, plan).s, table, plan, library_linear(x, weight, bias), act)


def adapted_partial_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    norm: NextNorm | None, table: PagedTable, plan: AdapterPlan,
) -> torch.Tensor | HalfNorm | None:  # fmt: skip
    """The sum as `pagebus.kernels.linear.linear.partial_linear` gives a product: [T, N]; or float32 [S, T, N] to be
    summed up; or, added to ``residual`` [T, N], None or half of the ``norm`` of that."""
    norm = norm if len(x) <= MOST_FUSED else None  # those that read the rest of it would have to divide it first
    chosen = chosen_for_residual(x, weight, bias, residual, norm)
    config = chosen.config
    if chosen.form == "residual":
        assert residual is not None
        assert norm is not None
        assert config is not None
        return residual_linear(x, weight, bias, residual, norm, config, _both(x, table, plan, "residual", config))
    if config is not None and adds_in_tiles(config, len(x)):
        product = partial_linear(x, weight, bias, config=config, expansion=_both(x, table, plan, "partial", config))
        assert isinstance(product, torch.Tensor)
        return product
    expansion = _shrunk(x, table, plan)
    if chosen.form == "added":
        assert residual is not None
        residual.addmm_(x, weight.t())
        _behind(expansion, residual)
        return None
    product = library_linear(x, weight, bias) if config is None else partial_linear(x, weight, bias, config=config)
    assert isinstance(product, torch.Tensor)
    _behind(expansion, product if product.dim() == 2 else product[0])
    return product


def adapted_linear_invariant(
    x: torch.Tensor | HalfNorm, weight: torch.Tensor, bias: torch.Tensor | None, table: PagedTable, plan: AdapterPlan
) -> torch.Tensor:
    """`adapted_linear` with results independent of other tokens. Segments are those of decodes, whatever the pass."""
    assert plan.tokens == DECODE_TOKENS
    assert isinstance(x, torch.Tensor)  # invariant products leave no halves
    return _behind(_shrunk(x, table, plan), linear_invariant(x, weight, bias))
