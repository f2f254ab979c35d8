"""The feed-forward part of a layer, with a gate or without."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.linear import GatedLinear, Linear, ResidualLinear
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.model.spec import Dense
from pagebus.kernels.quantized.layouts import Weight
from pagebus.kernels.quantized.products import Inputs


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
        self, stream: ResidualStream, x: Inputs, before: Norm | None, after: Norm | None,
        scale: float, padding: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add the part of x [T, H] to the stream; all else as in :meth:`ResidualStream.add`. ``padding`` is of use to
        experts only."""
        stream.add(self._gate_up.before(self.down, x), self.down, before, after, scale)

    @property
    def reader(self) -> Linear:
        """The one product that reads the norm before it."""
        return self._gate_up

    @property
    def products(self) -> list[Linear]:
        """In the order in which they are computed."""
        return [self._gate_up, self.down]

    @property
    def weights(self) -> dict[str, Weight]:
        """By the names of its products."""
        return {"gate_up": self._gate_up.weight, "down": self.down.weight}


class PlainMLP:
    """down(act(up(x)))."""

    __slots__ = ("_approximate", "_up", "down")

    reads_halves = True

    def __init__(self, spec: Dense, hidden: int, parameters: Parameters, prefix: str, ops: Ops) -> None:
        self._approximate = "tanh" if spec.act == "gelu_tanh" else "none"
        self._up = Linear(parameters, prefix, {"up_proj": spec.width}, hidden, ops, bias=spec.bias)
        self.down = ResidualLinear(parameters, prefix, {"down_proj": hidden}, spec.width, ops, bias=spec.bias)

    def into(
        self, stream: ResidualStream, x: Inputs, before: Norm | None, after: Norm | None,
        scale: float, padding: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """As :meth:`GatedMLP.into`."""
        stream.add(F.gelu(self._up(x), approximate=self._approximate), self.down, before, after, scale)

    @property
    def reader(self) -> Linear:
        """The one product that reads the norm before it."""
        return self._up

    @property
    def products(self) -> list[Linear]:
        """In the order in which they are computed."""
        return [self._up, self.down]

    @property
    def weights(self) -> dict[str, Weight]:
        """By the names of its products."""
        return {"up": self._up.weight, "down": self.down.weight}
