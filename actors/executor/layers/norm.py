"""Norms of hidden states."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.model.spec import NormSpec
from pagebus.kernels.coded.rounding import RoundedTokens


class Norm:
    """Normalises the last dimension, as ``spec`` says."""

    __slots__ = ("_bias", "_centred", "_ops", "eps", "spec", "weight")

    def __init__(self, parameters: Parameters, name: str, size: int, spec: NormSpec, ops: Ops) -> None:
        self.spec = spec
        self.weight = parameters.norm(f"{name}.weight", size, spec)
        self._bias = parameters.bias({f"{name}.bias": size}, self.weight.dtype) if spec.bias else None
        self._centred = spec.kind == "layer"
        self.eps = spec.eps
        self._ops = ops

    @property
    def may_be_halved(self) -> bool:
        """Whether a product before it may do half of it, and the one behind it the rest."""
        return self.spec.kind == "rms" and not self.spec.offset and not self.spec.wide and not self.spec.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D], a new tensor."""
        return self._ops.rms_norm(x, self.weight, self.eps, centred=self._centred, bias=self._bias)

    def of(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``out``, in which x is normalised; both [..., D]."""
        return self._ops.rms_norm(x, self.weight, self.eps, out, centred=self._centred, bias=self._bias)

    def of_sum(
        self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0, rounded: torch.dtype | None = None
    ) -> torch.Tensor | RoundedTokens:
        """Add x [T, D] times ``scale``, or its partial sums [S, T, D], to ``residual`` in place; the norm of the sum, a
        new tensor, perhaps ``rounded`` to this format."""
        return self._ops.add_rms_norm(
            x, residual, self.weight, self.eps, scale, centred=self._centred, bias=self._bias, rounded=rounded
        )

    def into(self, residual: torch.Tensor, x: torch.Tensor, following: Norm | None) -> torch.Tensor | None:
        """Add the norm of x [T, D], or of the sum of its parts [S, T, D], to ``residual`` in place; the ``following``
        norm of the sum, a new tensor, if there is one."""
        assert not self._centred
        assert self._bias is None
        if following is None:
            return self._ops.add_normed(x, residual, self.weight, self.eps, None)
        assert following.eps == self.eps
        return self._ops.add_normed(x, residual, self.weight, self.eps, following.weight)
