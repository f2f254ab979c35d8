"""The weights of a layer's experts, stacked."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.kernels.moe.activation import Gate


class ExpertWeights(NamedTuple):
    """E experts: ``gate_up`` [E, 2I, H], an expert's gate rows before its up rows, and ``down`` [E, H, I], contiguous;
    ``gate_up_bias`` [E, 2I] and ``down_bias`` [E, H], if there are any; ``gate``: what becomes of gate and up;
    ``among``: experts that tokens choose among, where these are a part of them (0: these are all)."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: Gate = Gate()
    among: int = 0
