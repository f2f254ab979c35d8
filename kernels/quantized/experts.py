"""Mixtures whose experts' weights may be quantized.

Kernels read the numbers themselves where they can. Where they cannot, all experts of a layer are dequantized for each
pass: that is slow, and takes memory for one layer in the model's format, but serves any layout.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.moe import experts as dense_experts
from pagebus.kernels.moe.activation import Gate, gate_reference
from pagebus.kernels.moe.coded import CodedConfig, CodedExperts, coded_experts
from pagebus.kernels.moe.grouped import combine_reference
from pagebus.kernels.moe.launch.shapes import Shape, brought_here
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.quantized.coding import coded_of, experts_kind_of
from pagebus.kernels.quantized.dequantize import dequantize
from pagebus.kernels.quantized.expert_choice import choose_quantized_experts
from pagebus.kernels.quantized.layouts import Layout, W8Rows, Weight, in_columns, tensors_of


class QuantizedExperts(NamedTuple):
    """As `ExpertWeights`, with layouts [E, 2I, H] and [E, H, I]."""

    gate_up: Layout
    down: Layout
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: Gate = Gate()
    among: int = 0


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
    gate, up = expert_product(x, layer.gate_up, layer.gate_up_bias, expert).chunk(2, dim=1)
    return expert_product(gate_reference(gate, up, layer.gate), layer.down, layer.down_bias, expert)


def expert_product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    """x [N, K] times one expert's matrix of ``weight`` [E, .., K], plus its bias."""
    if isinstance(weight, torch.Tensor):
        dense = weight[expert]
    else:
        dense = weight.part(expert, 0, weight.shape[-2]).dense(x.dtype)
    return torch.nn.functional.linear(x, dense, None if bias is None else bias[expert])


def moe_experts(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts) -> torch.Tensor:
    """The weighted sum of each token's experts, as `moe_experts_reference`."""
    if isinstance(layer, ExpertWeights):
        return dense_experts.moe_experts(x, weights, experts, layer)
    return _quantized(x, weights, experts, layer, invariant=False)


def moe_experts_invariant(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Experts
) -> torch.Tensor:
    """`moe_experts`, of each token alone."""
    if isinstance(layer, ExpertWeights):
        return dense_experts.moe_experts_invariant(x, weights, experts, layer)
    return _quantized(x, weights, experts, layer, invariant=True)


def _quantized(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: QuantizedExperts, *, invariant: bool
) -> torch.Tensor:
    """As was chosen."""
    if len(x) == 0:
        return torch.empty_like(x)
    num_experts, hidden, width = layer.down.shape
    shape, target = Shape(num_experts, experts.shape[1], hidden, width), target_of(x.device)
    kinds = experts_kind_of(layer.gate_up), experts_kind_of(layer.down)
    num_tokens, shape = brought_here(len(x), shape, layer.among)
    choice = choose_quantized_experts(num_tokens, shape, kinds, x.dtype, target, invariant=invariant)
    if isinstance(choice.config, CodedConfig):
        return coded_experts(x, weights, experts, coded_layer(layer), choice.config)
    product = dense_experts.moe_experts_invariant if invariant else dense_experts.moe_experts
    return product(x, weights, experts, dequantized_layer(layer, x.dtype))


def coded_layer(layer: QuantizedExperts) -> CodedExperts:
    """As kernels read it, sharing memory."""
    gate_up, down = coded_of(layer.gate_up), coded_of(layer.down)
    assert gate_up is not None
    assert down is not None
    return CodedExperts(gate_up, down, layer.gate_up_bias, layer.down_bias, layer.gate)


def dequantized_layer(layer: QuantizedExperts, dtype: torch.dtype) -> ExpertWeights:
    """All of it, for a pass in ``dtype``."""
    return ExpertWeights(_dequantized(layer.gate_up, dtype), _dequantized(layer.down, dtype), *layer[2:])


def _dequantized(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K]"""
    dense = torch.empty(layout.shape, dtype=dtype, device=tensors_of(layout)[0].device)
    for expert, out in enumerate(dense):
        part = layout.part(expert, 0, layout.shape[-2])
        dequantize(part, out, 0)
        if not isinstance(part, W8Rows) and part.order is not None:
            out.copy_(in_columns(out, part.order))
    return dense
