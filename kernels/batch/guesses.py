"""The end of a draft head's pass: the likeliest token becomes a draft, and the chain goes on one position."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

BLOCK, WARPS = 8192, 16
"""Logits that a row's program reads at a time: few rows guess, so what counts is how soon one is through."""


def store_guesses_reference(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    following: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    features: torch.Tensor,
) -> None:
    """tokens[slots[r], starts[r]] is the likeliest by logits[r], the first of several, unless starts[r] < 0; then
    starts[r] goes on by one, as far as ends[r], and features[r] = following[r].

    logits [R, V] float32; token_ids [V] int32: what tokens these are (None: 0, 1...); following, features [R, F];
    tokens [S, L] int32; slots, starts, ends [R] int32. Only tokens, starts and features change.
    """
    best = logits.argmax(1)
    guess = best.to(torch.int32) if token_ids is None else token_ids[best]
    rows = (starts >= 0).nonzero().squeeze(1)
    tokens[slots[rows].long(), starts[rows].long()] = guess[rows]
    features.copy_(following)
    torch.minimum(starts + 1, ends, out=starts)


@triton.jit(do_not_specialize=["vocab", "tokens_ptr", "slots_ptr", "starts_ptr", "ends_ptr"])
def _store_guesses_kernel(
    logits_ptr,  # [R, V] float32
    ids_ptr,  # [V] or None
    following_ptr,  # [R, F] or None: features stay
    tokens_ptr,  # [S, L]
    slots_ptr,  # [R]
    starts_ptr,  # [R] in and out
    ends_ptr,  # [R]
    features_ptr,  # [R, F]
    vocab,
    stride_logits,
    stride_following,
    stride_tokens,
    stride_features,
    SIZE: tl.constexpr,  # F
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, BLOCK)
    best, place = tl.full([BLOCK], float("-inf"), tl.float32), at
    for begin in range(0, vocab, BLOCK):
        score = tl.load(logits_ptr + row * stride_logits + begin + at, mask=begin + at < vocab, other=float("-inf"))
        score = score.to(tl.float32)
        place = tl.where(score > best, begin + at, place)
        best = tl.maximum(best, score)
    chosen = tl.min(tl.where(best == tl.max(best, axis=0), place, vocab - 1), axis=0)
    if ids_ptr is not None:
        chosen = tl.load(ids_ptr + chosen)
    start = tl.load(starts_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    tl.store(tokens_ptr + slot * stride_tokens + start, chosen, mask=start >= 0)
    tl.store(starts_ptr + row, tl.minimum(start + 1, tl.load(ends_ptr + row)))
    if following_ptr is not None:
        column = tl.arange(0, BLOCK_SIZE)
        feature = tl.load(following_ptr + row * stride_following + column, mask=column < SIZE)
        tl.store(features_ptr + row * stride_features + column, feature, mask=column < SIZE)


def store_guesses(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    following: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    features: torch.Tensor,
) -> None:
    """As `store_guesses_reference`, in one launch."""
    rows, size = features.shape
    assert logits.stride(1) == tokens.stride(1) == 1
    assert following.shape == features.shape
    assert len(logits) == len(slots) == len(starts) == len(ends) == rows
    same = size == 0 or following.data_ptr() == features.data_ptr()
    _store_guesses_kernel[(rows,)](
        logits, token_ids, None if same else following, tokens, slots, starts, ends, features, logits.shape[1],
        logits.stride(0), following.stride(0), tokens.stride(0), features.stride(0), SIZE=size,
        BLOCK_SIZE=next_power_of_2(max(size, 1)), BLOCK=min(BLOCK, next_power_of_2(logits.shape[1])), num_warps=WARPS,
        **pdl(logits.device),
    )  # fmt: skip
