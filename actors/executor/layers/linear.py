"""Matrix products with weights, one or several checkpoint projections at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from actors.executor.layers.norm import RMSNorm
from actors.executor.layers.parameters import Parameters
from actors.executor.ops import Ops
from kernels.norm import HalfNorm, NextNorm

Added: TypeAlias = torch.Tensor | HalfNorm | None
"""What becomes of a product that goes into the residual [T, D]: still to be added to it, [T, D] or partial sums
[S, T, D]; or added, and the next norm half done; or added, and no more (None)."""


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

    def __call__(self, x: torch.Tensor | HalfNorm) -> torch.Tensor:
        product: torch.Tensor = self._ops.linear(x, self.weight, self.bias)
        return product


class ResidualLinear(Linear):
    """A product that goes into the residual [T, out]."""

    __slots__ = ("_counters",)

    def __init__(
        self, parameters: Parameters, prefix: str, outputs: Mapping[str, int], num_inputs: int, ops: Ops, *, bias: bool
    ) -> None:
        super().__init__(parameters, prefix, outputs, num_inputs, ops, bias=bias)
        self._counters = torch.zeros(len(self.weight), dtype=torch.int32, device=parameters.device)

    def add(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm | None) -> Added:
        """The product of x, as :meth:`RMSNorm.add` takes it; ``norm`` comes next, if it may be half done here."""
        following = None if norm is None else NextNorm(norm.weight, norm.eps, self._counters)
        product: Added = self._ops.partial_linear(x, self.weight, self.bias, residual, following)
        return product


class GatedLinear(Linear):
    """silu(gate) * up of the product with two matrices of equal width, gate and up: x [T, in] -> [T, out / 2]."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor | HalfNorm) -> torch.Tensor:
        product: torch.Tensor = self._ops.gated_linear(x, self.weight, self.bias)
        return product
