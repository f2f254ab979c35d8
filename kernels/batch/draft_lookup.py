"""Drafts by lookup: what followed where a sequence's last tokens stood before, or in what is predicted for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagebus.kernels.common.triton import next_power_of_2, tl, triton

Tokens = NDArray[np.int32]


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
    predicted: torch.Tensor,
    first_predicted: int,
) -> None:
    """Draft the next tokens of the sequences in slots [M], each slot once.

    The longest end of a sequence, of ``longest`` tokens at most, is sought before that end, and in the text that is
    predicted for it; of equally long ones the latest counts, and one in the prediction before all others. If it has at
    least ``shortest`` tokens, the ``num_drafts`` behind it are the drafts. Where these reach the sequence's end they go
    on with themselves, so a sequence with a period repeats it; at a prediction's end there are no more.

    tokens [S, L] int32 and lengths [S] (at least 1) are those of the slots; predicted [S] tokens lie there from
    first_predicted on. Drafts are stored behind the sequences, as `store_drafts_reference` does, their number in
    found [S] and in out [M].
    """
    rows = slots.long()
    ends, counts = lengths[rows].long(), predicted[rows].long()
    history = tokens[rows, : int(ends.max()) if len(rows) else 0]
    text = tokens[rows, first_predicted : first_predicted + (int(counts.max()) if len(rows) else 0)]
    size, place = _longest_end(history, ends, history, ends, shortest, longest)
    other_size, other_place = _longest_end(history, ends, text, counts, shortest, longest)
    step = torch.arange(num_drafts, device=tokens.device)
    period = (ends - place - 1).clamp(min=1).unsqueeze(1)
    drafts = history.gather(1, (place.unsqueeze(1) + 1).clamp(min=0) + step % period)
    drafts = torch.where(size.unsqueeze(1) > 0, drafts, -1)
    if text.shape[1]:
        at = other_place.unsqueeze(1) + 1 + step
        told = text.gather(1, at.clamp(0, text.shape[1] - 1))
        told = torch.where(at < counts.unsqueeze(1), told, -1)
        drafts = torch.where(((other_size > 0) & (other_size >= size)).unsqueeze(1), told, drafts)
    store_drafts_reference(tokens, lengths, found, slots, drafts, vocab_size)
    out.copy_(found[rows])


def _longest_end(
    history: torch.Tensor, ends: torch.Tensor, text: torch.Tensor, counts: torch.Tensor, shortest: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row's history, which ends before ``ends`` [M]: how many of its last tokens [M] stand in ``text`` before
    the last of its ``counts`` [M] tokens, 0 for fewer than ``shortest``, and the place of the last of them [M]."""
    most = text.shape[1]
    place = torch.arange(most, device=text.device)
    alive = (place + 1 < counts.unsqueeze(1)).expand(len(text), -1)
    matched = torch.zeros_like(text)
    for back in range(min(longest, most)):
        wanted = history.gather(1, (ends - 1 - back).clamp(min=0).unsqueeze(1))
        there = text[:, (place - back).clamp(min=0)]
        alive = alive & (place >= back) & (back < ends).unsqueeze(1) & (there == wanted)
        matched += alive
    if not most:
        return torch.zeros_like(ends), torch.zeros_like(ends)
    best = torch.where(matched >= shortest, matched.long() * most + place, 0).amax(1)
    return best // most, best % most


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


def look_up_drafts_on_cpu(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    slots: torch.Tensor,
    num_drafts: int,
    shortest: int,
    longest: int,
    vocab_size: int,
    out: torch.Tensor,
    predicted: torch.Tensor,
    first_predicted: int,
) -> None:
    """As `look_up_drafts_reference`, row by row: few texts repeat themselves, and these in few places."""
    table, counts, places = tokens.numpy(), predicted.numpy(), slots.numpy()
    numbers = np.zeros(len(places), np.int32)
    sizes, predicted_sizes = lengths.numpy().take(places).tolist(), counts.take(places).tolist()
    for row, slot in enumerate(places.tolist()):
        line, size, count = table[slot], sizes[row], predicted_sizes[row]
        if not count and not _may_repeat(line[:size], shortest):
            continue
        text, told = line[:size], line[first_predicted : first_predicted + count]
        drafts = _drafts_on_cpu(text, told, num_drafts, shortest, longest)
        if drafts is None:
            continue
        drafts = drafts[: len(line) - size]
        bad = np.flatnonzero((drafts < 0) | (drafts >= vocab_size))
        drafts = drafts[: bad[0]] if len(bad) else drafts
        line[size : size + len(drafts)] = drafts
        numbers[row] = len(drafts)
    found.numpy()[places] = numbers
    out.numpy()[:] = numbers


def _may_repeat(text: Tokens, shortest: int) -> bool:
    """Whether the last ``shortest`` tokens of the text may stand somewhere before: a search through its bytes, the
    cheapest way to say no."""
    return text[-shortest:].tobytes() in text[:-1].tobytes()


def _drafts_on_cpu(text: Tokens, told: Tokens, num_drafts: int, shortest: int, longest: int) -> Tokens | None:
    """What follows the longest end of the text in itself, or in what is ``told``; None if it is in neither."""
    size, end = _end_on_cpu(text, text, shortest, longest)
    if len(told):
        told_size, told_end = _end_on_cpu(text, told, shortest, longest)
        if told_size and told_size >= size:
            return told[told_end : told_end + num_drafts]
    return np.resize(text[end : end + num_drafts], num_drafts) if size else None


def _end_on_cpu(text: Tokens, source: Tokens, shortest: int, longest: int) -> tuple[int, int]:
    """How many of the last tokens of the text stand in the source before its last token, 0 for fewer than ``shortest``,
    and where they end."""
    if shortest > len(text) or shortest >= len(source):
        return 0, 0
    matches = source[shortest - 1 : -1] == text[-1]
    for back in range(1, shortest):
        matches &= source[shortest - 1 - back : -1 - back] == text[-1 - back]
    ends, size = matches.nonzero()[0] + shortest, shortest
    if not len(ends):
        return 0, 0
    while size < min(longest, len(text)):
        longer = ends[ends > size]
        longer = longer[source[longer - size - 1] == text[-size - 1]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return size, int(ends[-1])


@triton.jit
def _best_place(history, length, text, count, shortest, longest, BLOCK: tl.constexpr):
    """The place in the text where most of the last tokens of the history end, with their number in the upper half of
    the result; -1: fewer than `shortest` stand anywhere before the last of its `count` tokens."""
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, count - 1, BLOCK):
        place = start + tl.arange(0, BLOCK)
        alive = place + 1 < count
        matched = tl.zeros([BLOCK], tl.int32)
        back = 0
        going = 1
        while (going > 0) & (back < longest) & (back < length):
            wanted = tl.load(history + length - 1 - back)
            alive = alive & (place >= back)
            there = tl.load(text + place - back, mask=alive, other=-1)
            alive = alive & (there == wanted)
            matched += alive.to(tl.int32)
            going = tl.max(alive.to(tl.int32), axis=0)
            back += 1
        score = (matched.to(tl.int64) << 32) + place.to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= shortest, score, -1))
    return tl.max(best, axis=0)


@triton.jit(do_not_specialize=["slots_ptr", "out_ptr", "vocab", "max_tokens", "shortest", "longest", "first_predicted"])
def _look_up_drafts_kernel(
    tokens_ptr,  # [S, L]
    lengths_ptr,  # [S]
    found_ptr,  # [S] out
    slots_ptr,  # [M]
    out_ptr,  # [M] out
    predicted_ptr,  # [S]
    stride_tokens,
    max_tokens,  # L
    vocab,
    shortest,
    longest,
    first_predicted,
    NUM_DRAFTS: tl.constexpr,
    DRAFTS: tl.constexpr,  # NUM_DRAFTS, rounded up
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    slot = tl.load(slots_ptr + run).to(tl.int64)
    history = tokens_ptr + slot * stride_tokens
    length, count = tl.load(lengths_ptr + slot), tl.load(predicted_ptr + slot)
    own = _best_place(history, length, history, length, shortest, longest, BLOCK)
    told = _best_place(history, length, history + first_predicted, count, shortest, longest, BLOCK)
    is_told = (told >= 0) & ((told >> 32) >= (own >> 32))
    winner = tl.where(is_told, told, own)
    first = (winner & 0xFFFFFFFF).to(tl.int32) + 1
    step = tl.arange(0, DRAFTS)
    period = tl.maximum(length - first, 1)
    place = tl.where(is_told, first_predicted + first + step, first + step % period)
    wanted = (step < NUM_DRAFTS) & (winner >= 0) & ((first + step < count) | (is_told == 0))
    draft = tl.load(history + place, mask=wanted, other=-1)
    good = wanted & (draft >= 0) & (draft < vocab) & (length + step < max_tokens)
    number = tl.min(tl.where(good, DRAFTS, step), axis=0)
    number = tl.minimum(number, NUM_DRAFTS)
    tl.store(history + length + step, draft, mask=step < number)
    tl.store(found_ptr + slot, number)
    tl.store(out_ptr + run, number)


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
    predicted: torch.Tensor,
    first_predicted: int,
) -> None:
    """Draft the next tokens of the sequences in slots [M]; see `look_up_drafts_reference`."""
    assert tokens.stride(1) == 1
    assert out.shape == slots.shape
    assert out.is_contiguous()
    assert predicted.shape == lengths.shape
    if len(slots):
        _look_up_drafts_kernel[(len(slots),)](
            tokens, lengths, found, slots, out, predicted, tokens.stride(0), tokens.shape[1], vocab_size, shortest,
            longest, first_predicted, NUM_DRAFTS=num_drafts, DRAFTS=next_power_of_2(num_drafts), BLOCK=1024,
            num_warps=4,
        )  # fmt: skip
