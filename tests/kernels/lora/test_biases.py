"""Biases of adapters: a rank whose result is 1, whatever the token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.layers.norm import HalfNorm
from pagebus.kernels.linear.adapted import adapted_gated_linear, adapted_linear
from pagebus.kernels.linear.linear import whole_norm
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.lora.behind import add_adapters
from pagebus.kernels.lora.plan import DECODE_TOKENS, PROMPT_TOKENS, AdapterPlan
from pagebus.kernels.lora.reference import add_adapters_reference
from tests.kernels.lora.tables import contiguous_table
from tests.kernels.lora.test_adapters import GATE_UP, LARGEST, QKV, Case, error, mixed


class Biased(Case):
    """Adapters with a constant rank each, whose rows of A are zeros."""

    def __init__(self, widths: tuple[int, ...], device: torch.device, inputs: int = 300) -> None:
        super().__init__(widths, device, inputs=inputs)
        for index, each in enumerate(self.adapters):
            if each is not None:
                rank = each.b.shape[1]
                place = min(3 + 4 * index, rank - 1)
                each.a.view(-1, rank, inputs)[:, place] = 0.0
                self.adapters[index] = each._replace(constant=place + 1)
        self.table = contiguous_table(self.adapters, widths, LARGEST)
        assert self.table.constants

    def expected(self, x: torch.Tensor, plan: AdapterPlan, y: torch.Tensor) -> torch.Tensor:
        y = super().expected(x, plan, y)
        for token, adapter in enumerate(plan.of_token.tolist()):
            found = self.adapters[adapter] if adapter >= 0 else None
            if found is not None:
                y[token] += found.b[:, found.constant - 1].double()
        return y


@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PROMPT_TOKENS])
def test_behind_products(tokens: int, device: torch.device) -> None:
    """Inputs are of several parts, of which one has the constant."""
    case, plan = Biased(QKV, device), mixed(58, tokens, device)
    x, y = case.random(58, case.inputs), case.random(58, sum(QKV))
    wanted = case.expected(x, plan, y)
    assert error(add_adapters_reference(x, case.table, plan, y.clone()), wanted) < 1e-6
    assert error(add_adapters(x, case.table, plan, y), wanted) < 1e-6


def test_in_tiles_and_behind_half_a_norm(device: torch.device) -> None:
    """No norm divides a constant."""
    case, plan = Biased(GATE_UP, device, 128), mixed(37, DECODE_TOKENS, device)
    x, config = case.random(37, 128), TileConfig(24, 16, 32, 3, 4)
    half = HalfNorm(x, x.pow(2).sum(1).unsqueeze(0), 1e-5)
    whole = whole_norm(half)
    for given, read in ((x, x), (half, whole)):
        wanted = case.expected(read, plan, F.linear(read, case.weight))
        assert error(adapted_linear(given, case.weight, None, case.table, plan, config), wanted) < 1e-6
        gate, up = wanted.chunk(2, dim=1)
        result = adapted_gated_linear(given, case.weight, None, case.table, plan, config)
        assert error(result, F.silu(gate) * up) < 1e-6
