"""The gated feed-forward part of a layer."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.linear import GatedLinear, ResidualLinear
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.model.spec import Dense
from pagebus.kernels.layers.norm import HalfNorm


class GatedMLP:
    """down(act(gate(x)) * up(x)); ``fused`` is the name of gate and up in files that have them as one tensor."""

    __slots__ = ("_gate_up", "down")

    reads_halves = True
    """Whether the norm before it may be done by halves."""

    def __init__(
        self, spec: Dense, hidden: int, parameters: Parameters, prefix: str, ops: Ops, fused: str | None = None
    ) -> None:
        sizes = {"gate_proj": spec.width, "up_proj": spec.width} if fused is None else {fused: 2 * spec.width}
        self._gate_up = GatedLinear(parameters, prefix, sizes, hidden, ops, bias=spec.bias, act=spec.act)
        self.down = ResidualLinear(parameters, prefix, {"down_proj": hidden}, spec.width, ops, bias=spec.bias)

    def into(
        self, stream: ResidualStream, x: torch.Tensor | HalfNorm, before: Norm | None, after: Norm | None,
        scale: float, padding: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add the part of x [T, H] to the stream; all else as in :meth:`ResidualStream.add`. ``padding`` is of use to
        experts only."""
        stream.add(self._gate_up(x), self.down, before, after, scale)
