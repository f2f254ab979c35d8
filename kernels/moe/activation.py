"""What experts do with gate and up: SiLU, GELU by its tanh formula, or the clamped gate of gpt-oss."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagebus.kernels.common.triton import constant, tl, triton
from pagebus.kernels.linear.epilogue import gated_tile


class GateKind(StrEnum):
    """How gate and up become one."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SWIGLU_CLAMPED = "swiglu_clamped"


class Gate(NamedTuple):
    """``kind``; of the clamped one also ``alpha``, by which the gate is multiplied within the sigmoid, and ``limit``:
    the gate is at most that, and up lies between minus that and that."""

    kind: GateKind = GateKind.SILU
    alpha: float = 1.702
    limit: float = 7.0


SILU, GELU_TANH, SWIGLU_CLAMPED = (constant(str(kind)) for kind in GateKind)


def gate_reference(gate: torch.Tensor, up: torch.Tensor, how: Gate) -> torch.Tensor:
    """gate and up [.., I] -> [.., I], in their dtype."""
    if how.kind is GateKind.SILU:
        return F.silu(gate) * up
    if how.kind is GateKind.GELU_TANH:
        return F.gelu(gate, approximate="tanh") * up
    wide, other = gate.float().clamp(max=how.limit), up.float().clamp(-how.limit, how.limit)
    return ((other + 1.0) * wide * torch.sigmoid(how.alpha * wide)).to(gate.dtype)


@triton.jit
def gate_tile(gate, up, alpha, limit, KIND: tl.constexpr, dtype: tl.constexpr):
    """gate and up in float32 -> the same, rounded to ``dtype`` where separate operations would be."""
    if KIND == SILU:
        return gated_tile(gate, up, dtype, 1)  # SiLU by `GATES`
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if KIND == GELU_TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return (gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))).to(dtype).to(tl.float32) * up
    gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
