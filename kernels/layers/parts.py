"""Sums of the states of parts of prompts, which embeddings and scores are made of."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton

COLUMNS, TOKENS = 64, 16
"""Of a tile: a program adds up this many columns, this many tokens at a time."""


def sum_parts_reference(states: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sums over ``counts`` [p] states from ``firsts`` [p] on, int32 each: states [T, H] -> [p, H] float32. An empty
    part gives zeros, whatever its first is; states outside the parts may be anything."""
    ends = (firsts + counts).tolist()
    sums = [
        states[first:end].sum(0, dtype=torch.float32) if end > first else states.new_zeros(states.shape[1]).float()
        for first, end in zip(firsts.tolist(), ends, strict=True)
    ]
    return torch.stack(sums) if sums else states.new_empty((0, states.shape[1]), dtype=torch.float32)


@triton.jit
def _sum_parts_kernel(
    states_ptr,  # [T, H]
    firsts_ptr,  # [p]
    counts_ptr,  # [p]
    out_ptr,  # [p, H] float32
    size,  # H
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count = tl.load(firsts_ptr + part).to(tl.int64), tl.load(counts_ptr + part)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for begin in range(0, count, TOKENS):
        places = (first + begin + token)[:, None] * size + column[None, :]
        inside = (begin + token < count)[:, None] & (column < size)[None, :]
        sums += tl.load(states_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + part * size + column, tl.sum(sums, 0), mask=column < size)


def sum_parts(states: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """As `sum_parts_reference`, always in the same order: a part's sum does not depend on the others."""
    num_parts, size = len(firsts), states.shape[1]
    assert firsts.shape == counts.shape == (num_parts,)
    for tensor in (states, firsts, counts):
        assert tensor.is_contiguous()
    out = torch.empty((num_parts, size), dtype=torch.float32, device=states.device)
    if num_parts:
        _sum_parts_kernel[(num_parts, -(-size // COLUMNS))](
            states, firsts, counts, out, size, COLUMNS=COLUMNS, TOKENS=TOKENS, num_warps=4, **pdl(states.device)
        )
    return out
