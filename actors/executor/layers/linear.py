"""Matrix products with weights, one or several checkpoint projections at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from actors.executor.layers.parameters import Parameters
from actors.executor.ops import Ops


class Linear:
    """x [T, in] -> [T, out]. ``outputs`` maps the projections that are fused to their widths, in order."""

    __slots__ = ("_ops", "bias", "weight")

    def __init__(
        self, parameters: Parameters, prefix: str, outputs: Mapping[str, int], num_inputs: int, ops: Ops, *, bias: bool
    ) -> None:
        self._ops = ops
        weights = {f"{prefix}.{name}.weight": size for name, size in outputs.items()}
        self.weight = parameters.matrix(weights, num_inputs)
        biases = {f"{prefix}.{name}.bias": size for name, size in outputs.items()}
        self.bias = parameters.bias(biases) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._ops.linear(x, self.weight, self.bias)
        return product


class ResidualLinear(Linear):
    """A product that goes into the residual [T, out]: as :meth:`RMSNorm.add` takes it, perhaps as partial sums
    [S, T, out], or None if it is there already."""

    __slots__ = ()

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The product of x, which is still to be added to ``residual``; None if it has been."""
        product: torch.Tensor | None = self._ops.partial_linear(x, self.weight, self.bias, residual)
        return product


class GatedLinear(Linear):
    """silu(gate) * up of the product with two matrices of equal width, gate and up: x [T, in] -> [T, out / 2]."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._ops.gated_linear(x, self.weight, self.bias)
        return product
