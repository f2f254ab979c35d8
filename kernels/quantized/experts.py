"""Mixtures whose experts' weights may be quantized."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from pagebus.kernels.moe import experts as dense_experts
from pagebus.kernels.moe.activation import Gate, gate_reference
from pagebus.kernels.moe.grouped import combine_reference
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.quantized.layouts import Layout


class QuantizedExperts(NamedTuple):
    """As `ExpertWeights`, with layouts [E, 2I, H] and [E, H, I]."""

    gate_up: Layout
    down: Layout
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: Gate = Gate()


Experts: TypeAlias = ExpertWeights | QuantizedExperts


def moe_experts_reference(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts
) -> torch.Tensor:
    """x [T, H], weights [T, k] float32, experts [T, k] int32 (-1: none) -> the weighted sum of its experts' products
    for each token, [T, H]; of a token without experts 0. Dequantizes one expert at a time."""
    if isinstance(layer, ExpertWeights):
        return dense_experts.moe_experts_reference(x, weights, experts, layer)
    products = x.new_zeros(experts.numel(), layer.down.shape[-2])
    flat = experts.flatten()
    for expert in flat.unique().tolist():
        if expert >= 0:
            pairs = (flat == expert).nonzero().squeeze(1)
            products[pairs] = _expert(x.index_select(0, pairs // experts.shape[1]), layer, expert)
    return combine_reference(products.view(*experts.shape, -1), weights, experts)


def _expert(x: torch.Tensor, layer: QuantizedExperts, expert: int) -> torch.Tensor:
    """x [N, H] -> [N, H]."""
    gate, up = _product(x, layer.gate_up, layer.gate_up_bias, expert).chunk(2, dim=1)
    return _product(gate_reference(gate, up, layer.gate), layer.down, layer.down_bias, expert)


def _product(x: torch.Tensor, layout: Layout, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    dense = layout.part(expert, 0, layout.shape[-2]).dense(x.dtype)
    return torch.nn.functional.linear(x, dense, None if bias is None else bias[expert])


def _dense(layer: Experts) -> ExpertWeights:
    """What kernels take so far."""
    if not isinstance(layer, ExpertWeights):
        raise NotImplementedError("no kernel multiplies by quantized experts")
    return layer


def moe_experts(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts) -> torch.Tensor:
    """The weighted sum of each token's experts, as `moe_experts_reference`."""
    return dense_experts.moe_experts(x, weights, experts, _dense(layer))


def moe_experts_invariant(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts
) -> torch.Tensor:
    """`moe_experts`, of each token alone."""
    return dense_experts.moe_experts_invariant(x, weights, experts, _dense(layer))
