"""Repetition, presence and frequency penalties over a sequence's tokens."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import constant, tl, triton


def apply_penalties_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    first: int = 0,
) -> None:
    """Penalise tokens a sequence already holds, in place. All row arguments are [R].

    logits [R, V] float32; tokens [S, L] int32 by slot; a row's prompt is tokens[slot, :prompt_len], its output
    tokens[slot, prompt_len:len]. repetition (> 0, 1 = off): logits of tokens in prompt or output are divided by it
    when positive, multiplied when negative. Then frequency * count and presence are subtracted for output tokens.
    The logits are those of the tokens from ``first`` on.
    """
    active = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero().squeeze(1)
    if active.numel() == 0:
        return
    slots, lens, prompt_lens = slots[active].long(), lens[active].unsqueeze(1), prompt_lens[active].unsqueeze(1)
    length = int(lens.max())
    ids = tokens[slots, :length].long()
    place = torch.arange(length, device=tokens.device)
    part = logits[active]
    ids -= first
    here = (place < lens) & (ids >= 0) & (ids < part.shape[1])
    ids = torch.where(here, ids, 0)  # what lies past the end may be anything
    counts = torch.zeros_like(part).scatter_add_(1, ids, (here & (place >= prompt_lens)).to(part.dtype))
    seen = torch.zeros_like(part).scatter_add_(1, ids, here.to(part.dtype)) > 0
    factor = repetition[active].unsqueeze(1)
    part = torch.where(seen, torch.where(part > 0, part / factor, part * factor), part)
    part = part - frequency[active].unsqueeze(1) * counts
    part = part - presence[active].unsqueeze(1) * (counts > 0)
    logits[active] = part


IN_PROMPT_OR_OUTPUT = constant(1 << 30)  # beside the count of output tokens in the low bits


@triton.jit(do_not_specialize=["slots_ptr", "prompt_lens_ptr", "lens_ptr", "repetition_ptr", "presence_ptr",
                               "frequency_ptr"])  # fmt: skip
def _count_tokens_kernel(
    counts_ptr,  # [R, V] int32, zeros
    tokens_ptr,  # [S, L]
    slots_ptr,  # [R]
    prompt_lens_ptr,  # [R]
    lens_ptr,  # [R]
    repetition_ptr,  # [R]
    presence_ptr,  # [R]
    frequency_ptr,  # [R]
    stride_counts,
    stride_tokens,
    FIRST: tl.constexpr,  # token of the first logit
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    off = (tl.load(repetition_ptr + row) == 1.0) & (tl.load(presence_ptr + row) == 0.0)
    if off & (tl.load(frequency_ptr + row) == 0.0):
        return
    length = tl.load(lens_ptr + row)
    prompt = tl.load(prompt_lens_ptr + row)
    source = tokens_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_tokens
    for begin in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        token = tl.load(source + place, mask=place < length, other=0) - FIRST
        here = (place < length) & (token >= 0) & (token < VOCAB)
        target = counts_ptr + row * stride_counts + token
        tl.atomic_or(target, IN_PROMPT_OR_OUTPUT, mask=here, sem="relaxed")
        tl.atomic_add(target, 1, mask=here & (place >= prompt), sem="relaxed")


@triton.jit(do_not_specialize=["repetition_ptr", "presence_ptr", "frequency_ptr"])
def _penalties_kernel(
    logits_ptr,  # [R, V]
    counts_ptr,  # [R, V]
    repetition_ptr,  # [R]
    presence_ptr,  # [R]
    frequency_ptr,  # [R]
    stride_logits,
    stride_counts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    count = tl.load(counts_ptr + row * stride_counts + token, mask=mask, other=0)
    seen = mask & (count != 0)
    logit = tl.load(logits_ptr + row * stride_logits + token, mask=seen, other=0.0)
    logit = tl.where(logit > 0, logit / repetition, logit * repetition)
    in_output = count & (IN_PROMPT_OR_OUTPUT - 1)
    logit = logit - frequency * in_output.to(tl.float32) - tl.where(in_output > 0, presence, 0.0)
    tl.store(logits_ptr + row * stride_logits + token, logit, mask=seen)


def apply_penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    first: int = 0,
) -> None:
    """Penalise tokens a sequence already holds, in place; see `apply_penalties_reference`. Scratch: R * V int32."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert tokens.stride(1) == 1
    for vector in (slots, prompt_lens, lens, repetition, presence, frequency):
        assert vector.shape == (num_rows,)
        assert vector.is_contiguous()
    if num_rows == 0:
        return
    counts = torch.zeros((num_rows, vocab), dtype=torch.int32, device=logits.device)
    _count_tokens_kernel[(num_rows, max(1, 64 // num_rows))](
        counts, tokens, slots, prompt_lens, lens, repetition, presence, frequency, counts.stride(0), tokens.stride(0),
        FIRST=first, VOCAB=vocab, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    block = 2048
    _penalties_kernel[(num_rows, -(-vocab // block))](
        logits, counts, repetition, presence, frequency, logits.stride(0), counts.stride(0),
        VOCAB=vocab, BLOCK=block, num_warps=4,
    )  # fmt: skip
