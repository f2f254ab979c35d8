"""The gate of experts, behind sums that stand in memory."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.moe.activation import Gate, gate_reference, gate_tile


def gate_rows_reference(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """x [P, 2I] (gate | up) -> [P, I]."""
    first, second = x.chunk(2, dim=1)
    return gate_reference(first, second, gate)


@triton.jit
def _gate_rows_kernel(
    x_ptr,  # [P, 2I]
    out_ptr,  # [P, I]
    total_ptr,  # [1], or None: all rows
    alpha,
    limit,
    SIZE: tl.constexpr,  # I
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if total_ptr is not None:
        mask &= row < tl.load(total_ptr)
    gate = tl.load(x_ptr + row * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    result = gate_tile(gate, up, alpha, limit, KIND, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + column, result.to(out_ptr.dtype.element_ty), mask=mask)


def gate_rows(x: torch.Tensor, gate: Gate, total: torch.Tensor | None = None) -> torch.Tensor:
    """x [P, 2I] (gate | up) -> [P, I], of the first ``total`` [1] int32 rows, or of all."""
    rows, size = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = min(1024, next_power_of_2(size))
    _gate_rows_kernel[(rows, -(-size // block))](
        x, out, total, gate.alpha, gate.limit,
        SIZE=size, KIND=str(gate.kind), BLOCK=block, num_warps=4, **pdl(x.device),
    )  # fmt: skip
    return out
