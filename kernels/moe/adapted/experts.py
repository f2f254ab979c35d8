"""The experts of a layer, and what adapters add to both of their products, for each pair its own.

Adapters add before the gate, so nothing is fused here: pairs are sorted by expert, both products are left in memory,
and the kernels of dense products' adapters add to them. Launch shapes are those of ``--deterministic``, so that no pass
has kernels which none before it had. Where no token has an adapter, this is not called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.lora.expand import expand
from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.lora.reference import add_by_token
from pagebus.kernels.lora.shrink import shrink
from pagebus.kernels.moe.activation import gate_reference
from pagebus.kernels.moe.adapted.gates import gate_rows
from pagebus.kernels.moe.adapted.plan import plan_pairs, segment_pairs
from pagebus.kernels.moe.coded import CodedConfig, coded_pairs
from pagebus.kernels.moe.experts import shape_of
from pagebus.kernels.moe.grouped import combine, combine_reference, grouped_pairs
from pagebus.kernels.moe.launch.rule import choose_invariant
from pagebus.kernels.moe.launch.shapes import Shape, brought_here
from pagebus.kernels.moe.sorting import SortedPairs, sort_pairs
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.quantized.coding import experts_kind_of
from pagebus.kernels.quantized.expert_choice import choose_quantized_experts
from pagebus.kernels.quantized.experts import (
    Experts,
    QuantizedExperts,
    coded_layer,
    dequantized_layer,
    expert_product,
)


class ExpertTables(NamedTuple):
    """The matrices of adapters of both products: an entry for each expert of each place."""

    gate_up: PagedTable
    down: PagedTable


Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, SortedPairs], torch.Tensor]
"""One product of x [P, K], sorted, into [P, N], where the pairs' order says."""


def adapted_experts_reference(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts, tables: ExpertTables,
    of_token: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`moe_experts_reference` with what the adapters in the places ``of_token`` [T] int32 (-1: none) add."""
    (num_experts, num_rows), top_k = (layer.down.shape[0], layer.down.shape[-2]), experts.shape[1]
    products, flat = x.new_zeros(experts.numel(), num_rows), experts.flatten()
    for expert in flat.unique().tolist():
        if expert < 0:
            continue
        pairs = (flat == expert).nonzero().squeeze(1)
        adapter = of_token.index_select(0, pairs // top_k)
        entry = torch.where(adapter >= 0, adapter * num_experts + expert, -1)
        chosen = x.index_select(0, pairs // top_k)
        both = expert_product(chosen, layer.gate_up, layer.gate_up_bias, expert)
        gate, up = add_by_token(chosen, tables.gate_up, entry, both).chunk(2, dim=1)
        hidden = gate_reference(gate, up, layer.gate)
        product = expert_product(hidden, layer.down, layer.down_bias, expert)
        products[pairs] = add_by_token(hidden, tables.down, entry, product)
    return combine_reference(products.view(*experts.shape, num_rows), weights, experts)


def adapted_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts, tables: ExpertTables,
    of_token: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `adapted_experts_reference`."""
    return _adapted(x, weights, experts, layer, tables, of_token, invariant=False)


def adapted_experts_invariant(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts, tables: ExpertTables,
    of_token: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`adapted_experts`, of each token alone."""
    return _adapted(x, weights, experts, layer, tables, of_token, invariant=True)


def _adapted(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts, tables: ExpertTables,
    of_token: torch.Tensor, *, invariant: bool,
) -> torch.Tensor:  # fmt: skip
    if len(x) == 0:
        return torch.empty_like(x)
    num_experts, count = layer.down.shape[0], experts.numel()
    tokens, gate_up, down = _products(x, experts, layer)
    pairs = sort_pairs(experts, num_experts, tokens)
    size = segment_pairs(count, num_experts, invariant=invariant)
    plan, token, place, total = plan_pairs(experts, of_token, pairs, num_experts, size)
    inputs = x.index_select(0, token)
    both = x.new_empty(count, layer.gate_up.shape[-2])
    gate_up(inputs, both, replace(pairs, order=place))
    _add(inputs, tables.gate_up, plan, both)
    hidden, products = gate_rows(both, layer.gate, total), x.new_empty(count, layer.down.shape[-2])
    down(hidden, products, pairs)
    _add(hidden, tables.down, plan, products, pairs.order)
    return combine(products.view(*experts.shape, -1), weights, experts)


def _add(
    x: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Add to y [P, N] what the entries of ``plan`` make of x [P, K]."""
    expand(shrink(x, table, plan), table, plan, y, rows)


def _products(x: torch.Tensor, experts: torch.Tensor, layer: Experts) -> tuple[int, Product, Product]:
    """The pairs of an item, and both products of sorted pairs."""
    target, top_k = target_of(x.device), experts.shape[1]
    if isinstance(layer, QuantizedExperts):
        kinds = experts_kind_of(layer.gate_up), experts_kind_of(layer.down)
        num_experts, hidden, width = layer.down.shape
        tokens, shape = brought_here(len(x), Shape(num_experts, top_k, hidden, width), layer.among)
        config = choose_quantized_experts(tokens, shape, kinds, x.dtype, target, invariant=True).config
        if isinstance(config, CodedConfig):
            coded = coded_layer(layer)
            gate_up, down = coded_pairs(coded, experts, config)
            return config.gate_up.tokens, gate_up, down
        layer = dequantized_layer(layer, x.dtype)
    assert isinstance(layer, ExpertWeights)
    chosen = choose_invariant(*brought_here(len(x), shape_of(layer, top_k), layer.among), x.dtype)
    gate_up, down = grouped_pairs(layer, top_k, chosen)
    return chosen.tokens, gate_up, down
