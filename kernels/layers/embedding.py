"""The first kernel of a model: rows of the embedding matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton


def embedding_reference(input_ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """weight[input_ids] * scale: input_ids [T] integers in the vocabulary, weight [V, H] -> [T, H], a new tensor."""
    rows = F.embedding(input_ids, weight)
    return rows if scale == 1.0 else rows.mul_(scale)


@triton.jit
def _embedding_kernel(
    ids_ptr,  # [T]
    weight_ptr,  # [V, SIZE]
    out_ptr,  # [T, SIZE]
    factor,  # of all, if SCALED
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        # In this order, so that whatever starts after this kernel finds what was written before it: the attention plan.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(ids_ptr + token).to(tl.int64)
    values = tl.load(weight_ptr + row * SIZE + column, mask=column < SIZE)
    if SCALED:
        values = (values.to(tl.float32) * factor).to(values.dtype)
    tl.store(out_ptr + token * SIZE + column, values, mask=column < SIZE)


def embedding(input_ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """weight[input_ids] * scale, as `embedding_reference`."""
    num_tokens, size = len(input_ids), weight.shape[1]
    assert input_ids.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty((num_tokens, size), dtype=weight.dtype, device=weight.device)
    if num_tokens:
        block = min(1024, next_power_of_2(size))
        grid = (num_tokens, -(-size // block))
        _embedding_kernel[grid](
            input_ids, weight, out, scale,
            SIZE=size, BLOCK=block, SCALED=scale != 1.0, num_warps=4, **pdl(weight.device),
        )  # fmt: skip
    return out
