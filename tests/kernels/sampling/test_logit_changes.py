"""Logit rules and penalties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.sampling.logit_bias import apply_logit_rules, apply_logit_rules_reference
from pagebus.kernels.sampling.penalties import apply_penalties, apply_penalties_reference


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
