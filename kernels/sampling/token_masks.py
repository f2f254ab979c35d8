"""Applies token masks: which tokens a row may have, one bit per token."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import tl, triton


def apply_token_masks_reference(
    logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, first: int = 0
) -> None:
    """Set logits[r, t] to -inf, in place, where bit t % 32 of masks[places[r], t // 32] is not set.

    logits [R, V] float32, places [R] (negative: the row may have any token), masks [M, ceil(V / 32)] int32. If the
    logits are those of the tokens from ``first`` on, masks are still of all tokens.
    """
    end = first + logits.shape[1]
    part = masks[:, first // 32 : -(-end // 32)]
    words = torch.where(places.unsqueeze(1) < 0, -1, part[places.clamp(min=0).long()])
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, first % 32 :][:, : logits.shape[1]]
    logits.masked_fill_(allowed == 0, -torch.inf)


@triton.jit(do_not_specialize=["places_ptr", "stride_masks"])
def _token_masks_kernel(
    logits_ptr,  # [R, V]
    places_ptr,  # [R]
    masks_ptr,  # [M, ceil(V / 32)]
    stride_logits,
    stride_masks,
    FIRST: tl.constexpr,  # token of the first logit
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place < 0:
        return
    words = masks_ptr + place * stride_masks
    bit = token + FIRST
    word = tl.load(words + bit // 32, mask=token < VOCAB, other=-1)
    banned = ((word >> (bit % 32)) & 1) == 0
    tl.store(logits_ptr + row * stride_logits + token, float("-inf"), mask=banned & (token < VOCAB))


def apply_token_masks(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, first: int = 0) -> None:
    """Ban the tokens that each row's mask leaves out, in place; see `apply_token_masks_reference`."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert places.shape == (num_rows,)
    assert places.is_contiguous()
    assert masks.dtype == torch.int32
    assert masks.shape[1] >= -(-(first + vocab) // 32)
    assert masks.stride(1) == 1
    if num_rows:
        block = 1024
        _token_masks_kernel[(num_rows, -(-vocab // block))](
            logits, places, masks, logits.stride(0), masks.stride(0), FIRST=first, VOCAB=vocab, BLOCK=block, num_warps=4
        )
