"""Adds per-sequence values to single logits: logit_bias, and bans that last until min_tokens are generated."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import tl, triton


def apply_logit_rules_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    indexes: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    bias_until: torch.Tensor,
    first: int = 0,
) -> None:
    """Add bias_values[slot, i] to logits[r, bias_ids[slot, i]] while indexes[r] < bias_until[slot, i], in place.

    logits [R, V] float32, slots [R], indexes [R] (output index of the token being sampled, from 0), bias_ids [S, K]
    int32 (-1: empty entry), bias_values [S, K] float32 (-inf bans), bias_until [S, K] int32. The logits are those of
    the tokens from ``first`` on.
    """
    slots = slots.long()
    ids = bias_ids[slots].long()
    ids = torch.where(ids < 0, -1, ids - first)
    active = (ids >= 0) & (ids < logits.shape[1]) & (indexes.unsqueeze(1) < bias_until[slots])
    logits.scatter_add_(1, ids.clamp(0, logits.shape[1] - 1), torch.where(active, bias_values[slots], 0.0))


@triton.jit(do_not_specialize=["slots_ptr", "indexes_ptr", "stride_rules", "size"])
def _logit_rules_kernel(
    logits_ptr,  # [R, V]
    slots_ptr,  # [R]
    indexes_ptr,  # [R]
    ids_ptr,  # [S, K]
    values_ptr,  # [S, K]
    until_ptr,  # [S, K]
    stride_logits,
    stride_rules,
    size,  # K
    FIRST: tl.constexpr,  # token of the first logit
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < size
    rule = tl.load(slots_ptr + row).to(tl.int64) * stride_rules + entry
    token = tl.load(ids_ptr + rule, mask=mask, other=-1)
    active = (
        (token >= FIRST)
        & (token < FIRST + VOCAB)
        & (tl.load(indexes_ptr + row) < tl.load(until_ptr + rule, mask=mask, other=0))
    )
    value = tl.load(values_ptr + rule, mask=active, other=0.0)
    # Atomic, because one token may have a ban and a bias.
    tl.atomic_add(logits_ptr + row * stride_logits + (token - FIRST), value, mask=active, sem="relaxed")


def apply_logit_rules(
    logits: torch.Tensor,
    slots: torch.Tensor,
    indexes: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    bias_until: torch.Tensor,
    first: int = 0,
) -> None:
    """Add the rules of each row's slot to its logits, in place; see `apply_logit_rules_reference`."""
    num_rows, size = logits.shape[0], bias_ids.shape[1]
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert slots.shape == indexes.shape == (num_rows,)
    assert bias_ids.shape == bias_values.shape == bias_until.shape
    assert slots.is_contiguous()
    assert bias_ids.is_contiguous()
    assert bias_values.is_contiguous()
    assert bias_until.is_contiguous()
    assert indexes.is_contiguous()
    assert bias_values.dtype == torch.float32
    if num_rows == 0 or size == 0:
        return
    block = 128
    _logit_rules_kernel[(num_rows, -(-size // block))](
        logits, slots, indexes, bias_ids, bias_values, bias_until, logits.stride(0), bias_ids.stride(0), size,
        FIRST=first, VOCAB=logits.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
