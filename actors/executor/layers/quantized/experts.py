"""The experts of a layer whose weights are quantized."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.model.config import ModelError
from pagebus.actors.model.spec import Moe
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.quantized.experts import QuantizedExperts
from pagebus.kernels.quantized.layouts import Layout, tensors_of

BY_TURNS = "mxfp4"
"""The packing whose files have interleaved rows of gate and up, and outputs before inputs."""


def quantized_experts(
    spec: Moe, hidden: int, parameters: Parameters, prefix: str, stacked: Sequence[str],
    spellings: Sequence[Sequence[str]],
) -> QuantizedExperts | None:  # fmt: skip
    """Layouts [E, 2I, H] and [E, H, I], by their ``stacked`` names or those of each expert; None: they are not
    quantized.

    Raises:
        ModelError: some of them are, or in different ways.
    """
    each = [tuple(f"{prefix}.experts.{{}}.{name}" for name in names) for names in spellings]
    gate_up = parameters.expert_weight(
        spec.here, 2 * spec.width, hidden, f"{prefix}.{stacked[0]}", [names[:2] for names in each], BY_TURNS
    )
    down = parameters.expert_weight(
        spec.here, hidden, spec.width, f"{prefix}.{stacked[1]}", [names[2:] for names in each], BY_TURNS
    )
    if gate_up is None and down is None:
        return None
    scheme = parameters.scheme((f"{prefix}.{stacked[0]}",))
    by_turns = scheme is not None and scheme.packing == BY_TURNS
    if parameters.names.columns_first and spec.bias and not by_turns:
        raise ModelError(f"{prefix}: experts with biases that are stored column by column are not read quantized")
    if gate_up is None or down is None:
        raise ModelError(f"{prefix}: some products of its experts are quantized and others are not")
    gate, first, second = (
        Gate(GateKind(spec.act), spec.alpha, spec.limit),
        *(f"{prefix}.{name}_bias" for name in stacked),
    )
    gate_up_bias = _bias(parameters, first, gate_up) if spec.bias else None
    down_bias = _bias(parameters, second, down) if spec.bias else None
    if by_turns:
        parameters.after_load(lambda: _separate(gate_up, gate_up_bias))
    return QuantizedExperts(gate_up, down, gate_up_bias, down_bias, gate, spec.experts)


def _bias(parameters: Parameters, name: str, weight: Layout) -> torch.Tensor:
    """[E, N], as files with all experts in one tensor have it."""
    shape = weight.shape[0], weight.shape[-2]
    return parameters.stored_in_ways(shape, lambda tensor: [lambda: {name: tensor}])


def _separate(gate_up: Layout, bias: torch.Tensor | None) -> None:
    """Put all gates before all ups, whose rows were interleaved."""
    experts, rows = gate_up.shape[0], gate_up.shape[-2]
    order = torch.arange(rows, device=tensors_of(gate_up)[0].device).view(-1, 2).t().flatten()
    for expert in range(experts):
        gate_up.part(expert, 0, rows).reorder(order)
    if bias is not None:
        bias.copy_(bias.index_select(1, order))
