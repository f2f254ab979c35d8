"""Drafts by lookup: what followed in the sequence itself, where its last tokens stood before."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import next_power_of_2, tl, triton


def look_up_drafts_reference(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    slots: torch.Tensor,
    num_drafts: int,
    shortest: int,
    longest: int,
    vocab_size: int,
    out: torch.Tensor,
) -> None:
    """Draft the next tokens of the sequences in slots [M], each slot once.

    The longest end of a sequence, of ``longest`` tokens at most, is sought before that end; of several places the
    latest counts. If it has at least ``shortest`` tokens, the ``num_drafts`` behind it are the drafts. Where these
    reach the sequence's end they go on with themselves, so a sequence with a period repeats it.

    tokens [S, L] int32 and lengths [S] (at least 1) are those of the slots. Drafts are stored behind them, as
    `store_drafts_reference` does, their number in found [S] and in out [M].
    """
    rows = slots.long()
    ends = lengths[rows].long()
    most = int(ends.max()) if len(rows) else 0
    history = tokens[rows, :most]
    place = torch.arange(most, device=tokens.device)  # of the last token of what may be such an end
    alive = (place + 1 < ends.unsqueeze(1)).expand(len(rows), -1)
    matched = torch.zeros_like(history)
    for back in range(min(longest, most)):
        wanted = history.gather(1, (ends - 1 - back).clamp(min=0).unsqueeze(1))
        there = history[:, (place - back).clamp(min=0)]
        alive = alive & (place >= back) & (there == wanted)
        matched += alive
    best = torch.where(matched >= shortest, matched.long() * most + place, -1).amax(1)
    first = torch.where(best >= 0, best % most + 1, 0)
    step = torch.arange(num_drafts, device=tokens.device)
    period = (ends - first).clamp(min=1).unsqueeze(1)
    drafts = history.gather(1, first.unsqueeze(1) + step % period)
    store_drafts_reference(tokens, lengths, found, slots, torch.where(best.unsqueeze(1) >= 0, drafts, -1), vocab_size)
    out.copy_(found[rows])


def store_drafts_reference(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    vocab_size: int,
) -> None:
    """Store drafts [M, K] behind the tokens of slots [M], and their number in found [S]: as far as there is room, and
    none from the first on that is no token of the vocabulary."""
    rows = slots.long()
    places = lengths[rows].long().unsqueeze(1) + torch.arange(drafts.shape[1], device=tokens.device)
    good = ((drafts >= 0) & (drafts < vocab_size) & (places < tokens.shape[1])).cumprod(1).bool()
    found[rows] = good.sum(1).to(found.dtype)
    row, place = good.nonzero(as_tuple=True)
    tokens[rows[row], places[row, place]] = drafts[row, place].to(tokens.dtype)


@triton.jit(do_not_specialize=["slots_ptr", "out_ptr", "vocab", "max_tokens", "shortest", "longest"])
def _look_up_drafts_kernel(
    tokens_ptr,  # [S, L]
    lengths_ptr,  # [S]
    found_ptr,  # [S] out
    slots_ptr,  # [M]
    out_ptr,  # [M] out
    stride_tokens,
    max_tokens,  # L
    vocab,
    shortest,
    longest,
    NUM_DRAFTS: tl.constexpr,
    DRAFTS: tl.constexpr,  # NUM_DRAFTS, rounded up
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    slot = tl.load(slots_ptr + run).to(tl.int64)
    history = tokens_ptr + slot * stride_tokens
    length = tl.load(lengths_ptr + slot)
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, length - 1, BLOCK):
        place = start + tl.arange(0, BLOCK)
        alive = place + 1 < length
        matched = tl.zeros([BLOCK], tl.int32)
        back = 0
        going = 1
        while (going > 0) & (back < longest) & (back < length):
            wanted = tl.load(history + length - 1 - back)
            alive = alive & (place >= back)
            there = tl.load(history + place - back, mask=alive, other=-1)
            alive = alive & (there == wanted)
            matched += alive.to(tl.int32)
            going = tl.max(alive.to(tl.int32), axis=0)
            back += 1
        score = (matched.to(tl.int64) << 32) + place.to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= shortest, score, -1))
    winner = tl.max(best, axis=0)
    first = (winner & 0xFFFFFFFF).to(tl.int32) + 1
    step = tl.arange(0, DRAFTS)
    wanted = (step < NUM_DRAFTS) & (winner >= 0)
    period = tl.maximum(length - first, 1)
    draft = tl.load(history + first + step % period, mask=wanted, other=-1)
    good = wanted & (draft >= 0) & (draft < vocab) & (length + step < max_tokens)
    count = tl.min(tl.where(good, DRAFTS, step), axis=0)
    count = tl.minimum(count, NUM_DRAFTS)
    tl.store(history + length + step, draft, mask=step < count)
    tl.store(found_ptr + slot, count)
    tl.store(out_ptr + run, count)


def look_up_drafts(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    slots: torch.Tensor,
    num_drafts: int,
    shortest: int,
    longest: int,
    vocab_size: int,
    out: torch.Tensor,
) -> None:
    """Draft the next tokens of the sequences in slots [M]; see `look_up_drafts_reference`."""
    assert tokens.stride(1) == 1
    assert out.shape == slots.shape
    assert out.is_contiguous()
    if len(slots):
        _look_up_drafts_kernel[(len(slots),)](
            tokens, lengths, found, slots, out, tokens.stride(0), tokens.shape[1], vocab_size, shortest, longest,
            NUM_DRAFTS=num_drafts, DRAFTS=next_power_of_2(num_drafts), BLOCK=1024, num_warps=4,
        )  # fmt: skip
