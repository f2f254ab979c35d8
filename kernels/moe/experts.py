"""The experts of a layer: y = the weighted sum over a token's experts of down(gate(x) * up(x)).

Few tokens are left as they are, pair by pair; others are sorted by expert. Nothing waits for the host, and no size
depends on which experts were chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.kernels.common.target import target_of
from pagebus.kernels.moe.activation import gate_reference
from pagebus.kernels.moe.choice import choose
from pagebus.kernels.moe.grouped import combine_reference, grouped_experts
from pagebus.kernels.moe.hopper_experts import specialized_experts
from pagebus.kernels.moe.launch.rule import choose_invariant
from pagebus.kernels.moe.launch.shapes import Config, Shape, Specialized, Unsorted, brought_here
from pagebus.kernels.moe.pairs import pair_experts
from pagebus.kernels.moe.sorting import sort_pairs
from pagebus.kernels.moe.weights import ExpertWeights


def moe_experts_reference(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
) -> torch.Tensor:
    """x [T, H], weights [T, k] float32, experts [T, k] int32 (-1: none) -> the weighted sum of its experts' products
    for each token, [T, H]; of a token without experts 0."""
    products = x.new_zeros(experts.numel(), layer.down.shape[1])
    flat = experts.flatten()
    for expert in flat.unique().tolist():
        if expert < 0:
            continue
        pairs = (flat == expert).nonzero().squeeze(1)
        chosen = x.index_select(0, pairs // experts.shape[1])
        products[pairs] = _expert(chosen, layer, expert)
    return combine_reference(products.view(*experts.shape, products.shape[1]), weights, experts)


def _expert(x: torch.Tensor, layer: ExpertWeights, expert: int) -> torch.Tensor:
    """x [N, H] -> [N, H]."""
    biases = (None if bias is None else bias[expert] for bias in (layer.gate_up_bias, layer.down_bias))
    gate_up_bias, down_bias = biases
    gate, up = F.linear(x, layer.gate_up[expert], gate_up_bias).chunk(2, dim=1)
    return F.linear(gate_reference(gate, up, layer.gate), layer.down[expert], down_bias)


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    config: Config | None = None,
) -> torch.Tensor:
    """x [T, H], weights [T, k] float32, experts [T, k] int32 (-1: none) -> the weighted sum of its experts' products
    for each token, [T, H]; of a token without experts 0. ``config``: this launch shape instead of the chosen one."""
    if len(x) == 0:
        return torch.empty_like(x)
    if config is None:
        config = choose(*_brought(x, experts, layer), x.dtype, target_of(x.device))
    if isinstance(config, Unsorted):
        return pair_experts(x, weights, experts, layer, config.gate_up, config.down)
    pairs = sort_pairs(experts, len(layer.down), config.tokens)
    if isinstance(config, Specialized):
        return specialized_experts(x, weights, experts, layer, pairs, config.gate_up, config.down)
    return grouped_experts(x, weights, experts, layer, pairs, config.gate_up, config.down)


def moe_experts_invariant(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
) -> torch.Tensor:
    """`moe_experts`, of each token alone."""
    config = choose_invariant(*_brought(x, experts, layer), x.dtype)
    return moe_experts(x, weights, experts, layer, config)


def _brought(x: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights) -> tuple[int, Shape]:
    """The tokens and the experts that launch shapes are chosen by."""
    return brought_here(len(x), shape_of(layer, experts.shape[1]), layer.among)


def shape_of(layer: ExpertWeights, top_k: int) -> Shape:
    """The experts, of which each token gets ``top_k``."""
    num_experts, hidden, width = layer.down.shape
    return Shape(num_experts, top_k, hidden, width)
