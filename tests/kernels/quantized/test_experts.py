"""Products with quantized experts: every layout, pairs as they come and sorted, all edges."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.choice import ExpertsKernel, Shape, token_counts
from pagebus.kernels.moe.coded import CodedConfig, coded_experts
from pagebus.kernels.quantized.coding import experts_kind_of
from pagebus.kernels.quantized.expert_choice import choose_quantized_experts
from pagebus.kernels.quantized.experts import (
    QuantizedExperts,
    coded_layer,
    moe_experts,
    moe_experts_reference,
)
from pagebus.kernels.quantized.layouts import Layout
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS, stacked

HIDDEN, WIDTH, EXPERTS, TOP_K = 200, 72, 3, 2
"""Neither is a multiple of the tiles, nor of groups."""
LIMIT = 2e-5
CLAMPED = Gate(GateKind.SWIGLU_CLAMPED, 1.3, 0.7)
PLAIN = {name: make for name, make in LAYOUTS.items() if "ordered" not in name}
OPPOSITE = dict(zip(PLAIN, reversed(PLAIN), strict=True))
"""Of the second product, so that the two of a layer differ."""


def make_layer(name: str, down: str, device: torch.device, *, gate: Gate = CLAMPED, biased: bool = True):
    def layout(which: str, rows: int, columns: int) -> Layout:
        return stacked((LAYOUTS | OTHERS)[which], EXPERTS, rows, columns, device)

    biases = (torch.randn(EXPERTS, rows, device=device) if biased else None for rows in (2 * WIDTH, HIDDEN))
    return QuantizedExperts(layout(name, 2 * WIDTH, HIDDEN), layout(down, HIDDEN, WIDTH), *biases, gate)


def make_tokens(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(count, HIDDEN + 8, device=device)[:, :HIDDEN]
    chosen = torch.rand(count, EXPERTS, device=device).argsort(1)[:, :TOP_K].int().contiguous()
    chosen[-1], x[-1] = -1, torch.nan
    return x, torch.rand(count, TOP_K, device=device), chosen


def config_of(layer: QuantizedExperts, *, ordered: bool) -> CodedConfig:
    kinds = [experts_kind_of(layer.gate_up), experts_kind_of(layer.down)]
    return CodedConfig(*(TileConfig(64, 16, kind.depth, 2, 2) for kind in kinds if kind is not None), ordered)


@pytest.mark.parametrize("name", PLAIN)
def test_products_are_those_of_dense_experts(name: str, device: torch.device) -> None:
    """With biases and a gate that clamps; tokens without experts get zeros, and nobody else sees them."""
    layer = make_layer(name, OPPOSITE[name], device)
    for ordered in (False, True):
        tokens = make_tokens(3, device)
        result = coded_experts(*tokens, coded_layer(layer), config_of(layer, ordered=ordered))
        assert not result[-1].any()
        wanted = moe_experts_reference(*tokens, layer)
        assert float((result - wanted)[:-1].norm() / wanted[:-1].norm()) < LIMIT
