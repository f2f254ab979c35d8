"""Root-mean-square norms."""

from __future__ import annotations

import torch

from actors.executor.layers.parameters import Parameters
from actors.executor.ops import Ops
from kernels.norm import HalfNorm


class RMSNorm:
    """Normalises the last dimension."""

    __slots__ = ("_ops", "eps", "weight")

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float, ops: Ops) -> None:
        self.weight = parameters.norm(f"{name}.weight", size)
        self.eps = eps
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D], a new tensor."""
        normed: torch.Tensor = self._ops.rms_norm(x, self.weight, self.eps)
        return normed

    def add(self, x: torch.Tensor | HalfNorm | None, residual: torch.Tensor) -> torch.Tensor | HalfNorm:
        """Add x [T, D], or its partial sums [S, T, D], to ``residual`` in place and return the norm of the sum. What is
        None has been added already, and what is half this norm is left to the product behind it."""
        if x is None:
            return self(residual)
        if isinstance(x, HalfNorm):
            return x
        normed: torch.Tensor = self._ops.add_rms_norm(x, residual, self.weight, self.eps)
        return normed
