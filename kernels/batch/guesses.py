"""A draft head's chain of guesses: where it begins, how it goes on, and the features that are kept for the next one."""

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

    logits [R, V] float32, or what N ranks tell of their parts, `part_guesses` [N, R, 2] of each in the order of their
    parts; token_ids [V] int32: what tokens these are (None: 0, 1...); following, features [R, F]; tokens [S, L] int32;
    slots, starts, ends [R] int32. Only tokens, starts and features change.
    """
    if logits.dim() == 3:
        winners = logits[:, :, 0].contiguous().view(torch.float32).argmax(0, keepdim=True)
        best = logits[:, :, 1].gather(0, winners).squeeze(0)
    else:
        best = logits.argmax(1)
    guess = best.to(torch.int32) if token_ids is None else token_ids[best]
    rows = (starts >= 0).nonzero().squeeze(1)
    tokens[slots[rows].long(), starts[rows].long()] = guess[rows]
    features.copy_(following)
    torch.minimum(starts + 1, ends, out=starts)


def part_guesses_reference(logits: torch.Tensor, first: int) -> torch.Tensor:
    """The likeliest by each row of a rank's logits [R, W] float32, the first of several: [R, 2] int32, the bits of its
    logit, and its number among all, of which the rank's begin with ``first``."""
    best = logits.max(1)
    return torch.stack([best.values.view(torch.int32), best.indices.int() + first], dim=1)


@triton.jit
def _likeliest(logits_ptr, vocab, BLOCK: tl.constexpr):
    """The largest of a row's logits, and its place, the first of several."""
    at = tl.arange(0, BLOCK)
    best, place = tl.full([BLOCK], float("-inf"), tl.float32), at
    for begin in range(0, vocab, BLOCK):
        score = tl.load(logits_ptr + begin + at, mask=begin + at < vocab, other=float("-inf")).to(tl.float32)
        place = tl.where(score > best, begin + at, place)
        best = tl.maximum(best, score)
    largest = tl.max(best, axis=0)
    return largest, tl.min(tl.where(best == largest, place, vocab - 1), axis=0)


@triton.jit(do_not_specialize=["vocab", "first"])
def _part_guesses_kernel(
    logits_ptr,  # [R, W] float32
    out_ptr,  # [R, 2]
    vocab,  # W
    first,
    stride_logits,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    score, place = _likeliest(logits_ptr + row * stride_logits, vocab, BLOCK)
    tl.store(out_ptr + 2 * row, score.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * row + 1, first + place)


def part_guesses(logits: torch.Tensor, first: int) -> torch.Tensor:
    """As `part_guesses_reference`, in one launch."""
    rows, width = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty((rows, 2), dtype=torch.int32, device=logits.device)
    if rows:
        _part_guesses_kernel[(rows,)](
            logits, out, width, first, logits.stride(0), BLOCK=min(BLOCK, next_power_of_2(width)), num_warps=WARPS,
            **pdl(logits.device),
        )  # fmt: skip
    return out


@triton.jit
def _told_best(told_ptr, row, RANKS: tl.constexpr):
    """What the rank with the largest logit told of this row, of as many as there are programs; the first of several."""
    stride_rank = 2 * tl.num_programs(0)
    best = tl.load(told_ptr + 2 * row).to(tl.float32, bitcast=True)
    chosen = tl.load(told_ptr + 2 * row + 1)
    for rank in tl.static_range(1, RANKS):
        place = told_ptr + rank * stride_rank + 2 * row
        score = tl.load(place).to(tl.float32, bitcast=True)
        chosen = tl.where(score > best, tl.load(place + 1), chosen)
        best = tl.maximum(best, score)
    return chosen


@triton.jit(do_not_specialize=["vocab", "tokens_ptr", "slots_ptr", "starts_ptr", "ends_ptr"])
def _store_guesses_kernel(
    logits_ptr,  # [R, V] float32, or [N, R, 2] int32
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
    RANKS: tl.constexpr,  # N; 0: logits are of all tokens
    SIZE: tl.constexpr,  # F
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if RANKS:
        chosen = _told_best(logits_ptr, row, RANKS)
    else:
        chosen = _likeliest(logits_ptr + row * stride_logits, vocab, BLOCK)[1]
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
    (rows, size), ranks = features.shape, len(logits) if logits.dim() == 3 else 0
    assert logits.stride(-1) == tokens.stride(1) == 1
    assert following.shape == features.shape
    assert size == 0 or following.stride(1) == features.stride(1) == 1
    assert logits.shape[-2] == len(slots) == len(starts) == len(ends) == rows
    assert not ranks or logits.is_contiguous()
    same, vocab = size == 0 or following.data_ptr() == features.data_ptr(), logits.shape[-1]
    _store_guesses_kernel[(rows,)](
        logits, token_ids, None if same else following, tokens, slots, starts, ends, features, vocab,
        0 if ranks else logits.stride(0), following.stride(0), tokens.stride(0), features.stride(0), RANKS=ranks,
        SIZE=size, BLOCK_SIZE=next_power_of_2(max(size, 1)), BLOCK=min(BLOCK, next_power_of_2(vocab)), num_warps=WARPS,
        **pdl(logits.device),
    )  # fmt: skip


def begin_chain_reference(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    lengths: torch.Tensor,
    kept: torch.Tensor,
    lag: int,
    dummy_slot: int,
    chain: torch.Tensor,
    features: torch.Tensor,
) -> None:
    """Begin with the sequences in ``slots`` [N] of these ``lengths`` [S], which verify the drafts behind the first
    token of each row of query_start [N + 1], and have the features ``kept`` [S, F].

    Out: chain [3, R]: the slots, the position that is read first, and the last one that has a block; features [R, F].
    Rows from N on have the dummy slot, and -1. All but features int32.
    """
    count, length = len(slots), lengths[slots.long()]
    chain[0], chain[1:] = dummy_slot, -1
    chain[0, :count] = slots
    chain[1, :count] = (length - 1 - lag).clamp_(min=0)
    chain[2, :count] = length - 2 + query_start.diff()
    features.copy_(kept[chain[0].long()])


@triton.jit(do_not_specialize=["slots_ptr", "query_start_ptr", "lengths_ptr", "chain_ptr", "count", "dummy_slot"])
def _begin_chain_kernel(
    slots_ptr,  # [N]
    query_start_ptr,  # [N + 1]
    lengths_ptr,  # [S]
    kept_ptr,  # [S, F]
    chain_ptr,  # [3, R]
    features_ptr,  # [R, F]
    count,  # N
    dummy_slot,
    stride_chain,
    LAG: tl.constexpr,
    SIZE: tl.constexpr,  # F
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    there = row < count
    slot = tl.where(there, tl.load(slots_ptr + row, mask=there, other=0), dummy_slot)
    length = tl.load(lengths_ptr + slot)
    begin = tl.load(query_start_ptr + row, mask=there, other=0)
    width = tl.load(query_start_ptr + row + 1, mask=there, other=0) - begin
    tl.store(chain_ptr + row, slot)
    tl.store(chain_ptr + stride_chain + row, tl.where(there, tl.maximum(length - 1 - LAG, 0), -1))
    tl.store(chain_ptr + 2 * stride_chain + row, tl.where(there, length - 2 + width, -1))
    if SIZE > 0:
        column = tl.arange(0, BLOCK_SIZE)
        feature = tl.load(kept_ptr + slot.to(tl.int64) * SIZE + column, mask=column < SIZE)
        tl.store(features_ptr + row * SIZE + column, feature, mask=column < SIZE)


def begin_chain(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    lengths: torch.Tensor,
    kept: torch.Tensor,
    lag: int,
    dummy_slot: int,
    chain: torch.Tensor,
    features: torch.Tensor,
) -> None:
    """As `begin_chain_reference`, in one launch."""
    rows, size = features.shape
    assert kept.is_contiguous()
    assert features.is_contiguous()
    assert chain.stride(1) == 1
    assert len(query_start) == len(slots) + 1 <= rows + 1
    _begin_chain_kernel[(rows,)](
        slots, query_start, lengths, kept, chain, features, len(slots), dummy_slot, chain.stride(0), LAG=lag, SIZE=size,
        BLOCK_SIZE=next_power_of_2(max(size, 1)), **pdl(lengths.device),
    )  # fmt: skip


def keep_features_reference(
    features: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, query_start: torch.Tensor,
    lengths: torch.Tensor, kept: torch.Tensor,
) -> None:  # fmt: skip
    """kept[slots[r]] is the one of ``features`` [T, F] of the last computed token of row r that counts: its tokens
    query_start[r]... [R + 1] begin at position starts[r], and the sequence has lengths[slots[r]] tokens by now, the
    last of which is not computed. Rows without tokens leave anything. All but features and kept [S, F] are int32."""
    rows = slots.long()
    computed = torch.minimum(lengths[rows] - starts - 1, query_start.diff()).clamp_(min=1)
    last = (query_start[:-1] + computed - 1).clamp_(max=len(features) - 1)
    kept[rows] = features.index_select(0, last)


@triton.jit(do_not_specialize=["slots_ptr", "starts_ptr", "query_start_ptr", "lengths_ptr", "num_tokens"])
def _keep_features_kernel(
    features_ptr,  # [T, F]
    slots_ptr,  # [R]
    starts_ptr,  # [R]
    query_start_ptr,  # [R + 1]
    lengths_ptr,  # [S]
    kept_ptr,  # [S, F]
    num_tokens,  # T
    SIZE: tl.constexpr,  # F
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    begin = tl.load(query_start_ptr + row)
    computed = tl.load(lengths_ptr + slot) - tl.load(starts_ptr + row) - 1
    computed = tl.maximum(tl.minimum(computed, tl.load(query_start_ptr + row + 1) - begin), 1)
    last = tl.minimum(begin + computed - 1, num_tokens - 1)
    column = tl.arange(0, BLOCK_SIZE)
    feature = tl.load(features_ptr + last.to(tl.int64) * SIZE + column, mask=column < SIZE)
    tl.store(kept_ptr + slot * SIZE + column, feature, mask=column < SIZE)


def keep_features(
    features: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, query_start: torch.Tensor,
    lengths: torch.Tensor, kept: torch.Tensor,
) -> None:  # fmt: skip
    """As `keep_features_reference`, in one launch."""
    rows, size = len(slots), features.shape[1]
    assert features.is_contiguous()
    assert kept.is_contiguous()
    assert len(starts) == rows == len(query_start) - 1
    _keep_features_kernel[(rows,)](
        features, slots, starts, query_start, lengths, kept, len(features), SIZE=size,
        BLOCK_SIZE=next_power_of_2(size), **pdl(features.device),
    )  # fmt: skip
