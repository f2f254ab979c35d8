"""Root-mean-square norms."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.parameters import Parameters


class RMSNorm:
    """Normalises the last dimension."""

    __slots__ = ("_ops", "eps", "weight")

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float, ops: Ops) -> None:
        self.weight = parameters.norm(f"{name}.weight", size)
        self.eps = eps
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D], a new tensor."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x [T, D], or its partial sums [S, T, D], to ``residual`` in place; the norm of the sum, a new tensor."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
