"""Sums of squares of rows: what ranks that have parts of a row each tell each other for its norm."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton


def row_squares_reference(x: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row: x [T, D] -> [T] float32."""
    return x.float().pow(2).sum(-1)


@triton.jit(do_not_specialize=["out_ptr"])
def _row_squares_kernel(
    x_ptr,  # [T, D]
    out_ptr,  # [T] float32
    stride_x,
    SIZE: tl.constexpr,  # D
    BLOCK: tl.constexpr,  # D rounded up
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(x * x, axis=0))


def row_squares(x: torch.Tensor) -> torch.Tensor:
    """As `row_squares_reference`, each row for itself, in one order for any number of rows; these may be apart."""
    num_rows, size = x.shape
    assert x.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block = next_power_of_2(size)
        _row_squares_kernel[(num_rows,)](
            x, out, x.stride(0), SIZE=size, BLOCK=block, num_warps=min(16, max(4, block // 512)), **pdl(x.device)
        )
    return out
