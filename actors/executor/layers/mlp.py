"""The gated feed-forward part of a layer."""

from __future__ import annotations

import torch

from actors.executor.layers.linear import Added, GatedLinear, ResidualLinear
from actors.executor.layers.norm import RMSNorm
from actors.executor.layers.parameters import Parameters
from actors.executor.ops import Ops
from actors.model_config import ModelConfig
from kernels.norm import HalfNorm


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    __slots__ = ("down", "gate_up")

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str, ops: Ops) -> None:
        size, bias = config.intermediate_size, config.mlp_bias
        sizes = {"gate_proj": size, "up_proj": size}
        self.gate_up = GatedLinear(parameters, prefix, sizes, config.hidden_size, ops, bias=bias)
        self.down = ResidualLinear(parameters, prefix, {"down_proj": config.hidden_size}, size, ops, bias=bias)

    def add(self, x: torch.Tensor | HalfNorm, residual: torch.Tensor, norm: RMSNorm | None) -> Added:
        """x [T, H] -> its output for ``residual`` [T, H]: see :meth:`ResidualLinear.add`."""
        return self.down.add(self.gate_up(x), residual, norm)
