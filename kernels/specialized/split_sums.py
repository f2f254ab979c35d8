"""Adds up what parts of K gave of a product, where nothing behind it does."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

BLOCK = 1024
"""Numbers of a program."""


def add_splits_reference(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """sums [S, T, N] float32 -> [T, N] of ``dtype``: their sum over S, plus ``bias`` [N], rounded once."""
    whole = sums.sum(0)
    return (whole if bias is None else whole + bias.float()).to(dtype)


@triton.jit(do_not_specialize=["size"])
def _add_splits_kernel(
    sums_ptr,  # [SPLITS, T, N] float32
    bias_ptr,  # [N] or None
    out_ptr,  # [T, N]
    num_columns,  # N
    size,  # T * N
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,  # SPLITS rounded up
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.arange(0, SPLITS_BLOCK).to(tl.int64)[:, None]
    sums = tl.load(sums_ptr + split * size + place[None, :], mask=inside[None, :] & (split < SPLITS), other=0.0)
    total = tl.sum(sums, axis=0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + place % num_columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_splits(sums: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """As `add_splits_reference`, into ``out`` [T, N], always in the same order."""
    splits, num_tokens, num_columns = sums.shape
    assert sums.is_contiguous()
    assert out.is_contiguous()
    size = num_tokens * num_columns
    if size:
        _add_splits_kernel[(-(-size // BLOCK),)](
            sums, bias, out, num_columns, size, SPLITS=splits, SPLITS_BLOCK=next_power_of_2(splits), BLOCK=BLOCK,
            num_warps=4, **pdl(out.device),
        )  # fmt: skip
    return out
