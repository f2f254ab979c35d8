"""Matrix products with weights, one or several checkpoint projections at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from actors.executor.layers.parameters import Parameters


class Linear:
    """x [T, in] -> [T, out]. ``outputs`` maps the projections that are fused to their widths, in order."""

    __slots__ = ("bias", "weight")

    def __init__(
        self, parameters: Parameters, prefix: str, outputs: Mapping[str, int], num_inputs: int, *, bias: bool
    ) -> None:
        weights = {f"{prefix}.{name}.weight": size for name, size in outputs.items()}
        self.weight = parameters.matrix(weights, num_inputs)
        biases = {f"{prefix}.{name}.bias": size for name, size in outputs.items()}
        self.bias = parameters.bias(biases) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
