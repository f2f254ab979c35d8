"""The gated feed-forward part of a layer."""

from __future__ import annotations

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.linear import GatedLinear, ResidualLinear
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.model.config import ModelConfig


class GatedMLP:
    """down(silu(gate(x)) * up(x)): ``gate_up`` is all but the last product, ``down`` goes into the residual stream."""

    __slots__ = ("down", "gate_up")

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str, ops: Ops) -> None:
        size, bias = config.intermediate_size, config.mlp_bias
        sizes = {"gate_proj": size, "up_proj": size}
        self.gate_up = GatedLinear(parameters, prefix, sizes, config.hidden_size, ops, bias=bias)
        self.down = ResidualLinear(parameters, prefix, {"down_proj": config.hidden_size}, size, ops, bias=bias)
