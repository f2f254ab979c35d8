"""Logit rules and penalties; and that each change of logits takes a range of the vocabulary as it takes all of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.sampling.bad_words import apply_bad_words, apply_bad_words_reference
from pagebus.kernels.sampling.logit_bias import apply_logit_rules, apply_logit_rules_reference
from pagebus.kernels.sampling.penalties import apply_penalties, apply_penalties_reference
from pagebus.kernels.sampling.token_masks import apply_token_masks, apply_token_masks_reference


@pytest.mark.parametrize("apply", [apply_logit_rules, apply_logit_rules_reference])
@pytest.mark.parametrize("width", [0, 5, 300])
def test_logit_rules(apply: Callable[..., None], width: int, device: torch.device) -> None:
    """Entries count until their output index, empty ones never; two of one token add up, a ban wins."""
    num_slots, vocab = 5, 400
    ids = torch.stack([torch.randperm(vocab)[:width] for _ in range(num_slots)]).to(torch.int32)
    ids = torch.where(torch.rand(num_slots, width) < 0.2, -1, ids)
    values, until = torch.randn(num_slots, width), torch.randint(0, 6, (num_slots, width), dtype=torch.int32)
    if width:
        ids[2, :3] = torch.tensor([7, 7, 9])
        values[2, :3] = torch.tensor([-math.inf, 2.0, -math.inf])
        until[2, :3] = torch.tensor([9, 9, 2])
    slots, indexes = torch.tensor([4, 2, 0], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    logits = torch.randn(3, vocab)
    expected = logits.clone()
    for row in range(3):
        slot = int(slots[row])
        for token, value, end in zip(ids[slot].tolist(), values[slot].tolist(), until[slot].tolist(), strict=True):
            if token >= 0 and int(indexes[row]) < end:
                expected[row, token] += value
    result = logits.to(device)
    apply(result, *(tensor.to(device) for tensor in (slots, indexes, ids, values, until)))
    torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("apply", [apply_penalties, apply_penalties_reference])
def test_penalties(apply: Callable[..., None], device: torch.device) -> None:
    """Repetition over prompt and output, presence and frequency over output; what lies past the end does not count."""
    rows, vocab, longest = 6, 60, 2100
    tokens = torch.randint(0, vocab, (rows + 1, longest), dtype=torch.int32)
    slots = torch.tensor([3, 0, 6, 1, 5, 2], dtype=torch.int32)
    prompt_lens = torch.tensor([5, 20, 0, 7, 1, 0], dtype=torch.int32)
    lens = torch.tensor([5, 45, 2100, 30, 20, 0], dtype=torch.int32)
    for row in range(rows):
        tokens[slots[row], lens[row] :] = 10**6  # garbage after the end
    repetition = torch.tensor([1.3, 1.0, 1.1, 1.0, 0.7, 2.0])
    presence = torch.tensor([0.5, 0.4, 0.0, 0.0, -1.0, 1.0])
    frequency = torch.tensor([0.5, 0.0, 0.01, 0.0, -0.2, 1.0])
    logits = torch.randn(rows, vocab) * 3
    expected = logits.clone()
    for row in range(rows):
        history = tokens[slots[row]].tolist()
        output = Counter(history[int(prompt_lens[row]) : int(lens[row])])
        for token in set(history[: int(lens[row])]):
            logit = expected[row, token]
            expected[row, token] = logit / repetition[row] if logit > 0 else logit * repetition[row]
            if output[token]:
                expected[row, token] -= frequency[row] * output[token] + presence[row]
    result = logits.to(device)
    apply(result, *(x.to(device) for x in (tokens, slots, prompt_lens, lens, repetition, presence, frequency)))
    torch.testing.assert_close(result.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(result.cpu()[3], logits[3])


ROWS, SLOTS, VOCAB = 3, 4, 1100
Arguments = tuple[torch.Tensor, ...]


def some_rules() -> Arguments:
    ids, until = torch.randint(-1, VOCAB, (SLOTS, 300)).int(), torch.full((SLOTS, 300), 9).int()
    return torch.tensor([3, 0, 2]).int(), torch.tensor([2, 0, 5]).int(), ids, torch.randn(SLOTS, 300), until


def some_penalties() -> Arguments:
    tokens, ends = torch.randint(VOCAB, (SLOTS, 40)).int(), torch.tensor([20, 0, 35]).int()
    return tokens, torch.tensor([3, 0, 2]).int(), ends, ends + 5, *(torch.rand(3, ROWS) + 0.5)


def some_masks() -> Arguments:
    return torch.tensor([2, -1, 4]).int(), torch.randint(-(2**31), 2**31, (5, -(-VOCAB // 32))).int()


def some_words() -> Arguments:
    """One of two tokens, whose first has just been written, and many of one."""
    tokens, words, lens = (torch.randint(VOCAB, (SLOTS, count)).int() for count in (40, 50, 50))
    slots, ends = torch.tensor([3, 0, 2]).int(), torch.tensor([20, 20, 20]).int()
    lens.fill_(1)
    lens[:, 0], lens[:, 1], words[3, 0] = 0, 2, tokens[3, 21]
    return tokens, slots, ends, torch.tensor([2, 0, 5]).int(), words, lens


@pytest.mark.parametrize(
    ("applies", "make"),
    [
        ((apply_logit_rules, apply_logit_rules_reference), some_rules),
        ((apply_penalties, apply_penalties_reference), some_penalties),
        ((apply_token_masks, apply_token_masks_reference), some_masks),
        ((apply_bad_words, apply_bad_words_reference), some_words),
    ],
)
def test_ranges_change_as_the_whole_does(
    applies: tuple[Callable[..., None], ...], make: Callable[[], Arguments], device: torch.device
) -> None:
    """Of ranges that begin anywhere, also within a word of a mask: logits of other tokens are others' to change."""
    given, logits = [each.to(device) for each in make()], torch.randn(ROWS, VOCAB, device=device)
    for apply in applies:
        whole = logits.clone()
        apply(whole, *given)
        assert (whole != logits).any(1).sum() >= 2
        for start, end in ((0, 37), (37, 700), (700, VOCAB)):
            part = logits[:, start:end].clone()
            apply(part, *given, first=start)
            torch.testing.assert_close(part, whole[:, start:end], rtol=0, atol=1e-6)
