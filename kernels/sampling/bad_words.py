"""Bans words of several tokens: the last token is banned where the others have just been generated."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import tl, triton


def apply_bad_words_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    indexes: torch.Tensor,
    word_tokens: torch.Tensor,
    word_lens: torch.Tensor,
    first: int = 0,
) -> None:
    """Set logits[r, t] to -inf, in place, where t would complete a word of slot slots[r] in the output.

    logits [R, V] float32; tokens [S, L] int32; slots, prompt_lens, indexes [R] (output index of the token being
    sampled: the output so far is tokens[slot, prompt_len:prompt_len + index]). word_tokens [S, F] int32 holds a slot's
    words one after another; word_lens [S, F] int32 is a word's length where its last token stands, 0 elsewhere.
    The logits are those of the tokens from ``first`` on.
    """
    if word_tokens.shape[1]:
        rows, ids = banned_reference(tokens, slots, prompt_lens, indexes, word_tokens, word_lens)
        here = (ids >= first) & (ids < first + logits.shape[1])
        logits[rows[here], ids[here] - first] = -torch.inf


def banned_reference(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    indexes: torch.Tensor,
    word_tokens: torch.Tensor,
    word_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and the ids of the tokens [n] that `apply_bad_words_reference` bans, F being at least 1."""
    slots = slots.long()
    words, lens, output = word_tokens[slots].long(), word_lens[slots], indexes.unsqueeze(1)
    ends = (prompt_lens + indexes).long().unsqueeze(1)
    place = torch.arange(words.shape[1], device=words.device)
    banned = (lens > 0) & (lens - 1 <= output)
    for back in range(1, int(lens.max())):
        before = words[:, (place - back).clamp(min=0)]
        written = tokens[slots.unsqueeze(1), (ends - back).clamp(min=0)].long()
        banned &= (back >= lens) | (before == written)
    rows, places = banned.nonzero(as_tuple=True)
    return rows, words[rows, places]


@triton.jit(do_not_specialize=["slots_ptr", "prompt_lens_ptr", "indexes_ptr", "stride_words", "size"])
def _bad_words_kernel(
    logits_ptr,  # [R, V]
    tokens_ptr,  # [S, L]
    slots_ptr,  # [R]
    prompt_lens_ptr,  # [R]
    indexes_ptr,  # [R]
    words_ptr,  # [S, F]
    lens_ptr,  # [S, F]
    stride_logits,
    stride_tokens,
    stride_words,
    size,  # F
    FIRST: tl.constexpr,  # token of the first logit
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    index = tl.load(indexes_ptr + row)
    words = words_ptr + slot * stride_words + place
    length = tl.load(lens_ptr + slot * stride_words + place, mask=place < size, other=0)
    banned = (length > 0) & (length - 1 <= index)
    end = tokens_ptr + slot * stride_tokens + tl.load(prompt_lens_ptr + row) + index
    for back in range(1, tl.max(tl.where(banned, length, 0), axis=0)):
        asked = banned & (back < length)
        written = tl.load(end - back + tl.zeros([BLOCK], tl.int32), mask=asked, other=0)
        banned = banned & ((tl.load(words - back, mask=asked, other=0) == written) | (back >= length))
    token = tl.load(words, mask=banned, other=0) - FIRST
    banned = banned & (token >= 0) & (token < VOCAB)
    tl.store(logits_ptr + row * stride_logits + token, float("-inf"), mask=banned)


def apply_bad_words(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    indexes: torch.Tensor,
    word_tokens: torch.Tensor,
    word_lens: torch.Tensor,
    first: int = 0,
) -> None:
    """Ban what would complete a word of each row's slot, in place; see `apply_bad_words_reference`."""
    num_rows, size = logits.shape[0], word_tokens.shape[1]
    assert logits.dtype == torch.float32
    assert logits.stride(1) == tokens.stride(1) == 1
    assert slots.shape == prompt_lens.shape == indexes.shape == (num_rows,)
    assert slots.is_contiguous()
    assert prompt_lens.is_contiguous()
    assert indexes.is_contiguous()
    assert word_tokens.shape == word_lens.shape
    assert word_tokens.is_contiguous()
    assert word_lens.is_contiguous()
    if num_rows == 0 or size == 0:
        return
    block = 256
    _bad_words_kernel[(num_rows, -(-size // block))](
        logits, tokens, slots, prompt_lens, indexes, word_tokens, word_lens, logits.stride(0), tokens.stride(0),
        word_tokens.stride(0), size, FIRST=first, VOCAB=logits.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
