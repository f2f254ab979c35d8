"""Adds what an expert for all tokens gives to what their own experts gave."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton


def add_shared_reference(total: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Add ``shared`` [T, H] to ``total`` [T, H] in place, times the sigmoid of each token's ``gate`` [T, 1] float32, if
    there is one. Gives ``total``."""
    product = shared.float() if gate is None else shared.float() * torch.sigmoid(gate)
    return total.copy_(total.float() + product)


@triton.jit
def _add_shared_kernel(
    total_ptr,  # [T, N] in and out
    shared_ptr,  # [T, N]
    gate_ptr,  # float32, a row for each token; or None
    stride_gate,
    SIZE: tl.constexpr,  # N
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = token * SIZE + column
    shared = tl.load(shared_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        shared *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token * stride_gate)))
    total = tl.load(total_ptr + places, mask=mask, other=0.0).to(tl.float32) + shared
    tl.store(total_ptr + places, total.to(total_ptr.dtype.element_ty), mask=mask)


def add_shared(total: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Add ``shared`` [T, H] to ``total`` [T, H] in place, times the sigmoid of each token's ``gate`` [T, 1] float32, if
    there is one. Gives ``total``."""
    num_tokens, size = total.shape
    assert total.is_contiguous()
    assert shared.is_contiguous()
    if num_tokens == 0:
        return total
    block = min(1024, next_power_of_2(size))
    _add_shared_kernel[(num_tokens, -(-size // block))](
        total, shared, gate, 0 if gate is None else gate.stride(0),
        SIZE=size, BLOCK=block, num_warps=4, **pdl(total.device),
    )  # fmt: skip
    return total
