"""Log probabilities of tokens, and what sequences may not write."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.sampling.bad_words import apply_bad_words, apply_bad_words_reference
from pagebus.kernels.sampling.logprobs import token_logprobs, token_logprobs_reference
from pagebus.kernels.sampling.token_masks import apply_token_masks, apply_token_masks_reference


@pytest.mark.parametrize("compute", [token_logprobs, token_logprobs_reference])
@pytest.mark.parametrize(("vocab", "num_top"), [(30, 20), (5000, 20), (4096, 1), (70, 0)])
def test_token_logprobs(compute: Callable[..., torch.Tensor], vocab: int, num_top: int, device: torch.device) -> None:
    """Log softmax at the token and at the largest, ranks, ids in order; equal logits by id, also across chunks."""
    logits = torch.randn(4, vocab) * 4
    logits[1] = logits[1].round()  # many equal ones
    logits[2, ::3] = -math.inf
    logits[3] = -0.0
    logits[3, vocab // 2] = 0.0
    tokens = torch.tensor([vocab - 1, 7, 1, 5], dtype=torch.int32)
    result = compute(logits.to(device), tokens.to(device), num_top).cpu()
    expected = logits.log_softmax(1)
    order = [sorted(range(vocab), key=lambda i, row=row: (-row[i], i)) for row in logits.tolist()]
    assert result.shape == (4, 2 + 2 * num_top)
    picked = expected.gather(1, tokens.long().unsqueeze(1))[:, 0]
    torch.testing.assert_close(result[:, 0].contiguous().view(torch.float32), picked, atol=2e-6, rtol=1e-6)
    assert result[:, 1].tolist() == [ids.index(token) + 1 for ids, token in zip(order, tokens.tolist(), strict=True)]
    top = result[:, 2 : 2 + num_top]
    assert top.tolist() == [ids[:num_top] for ids in order]
    values = result[:, 2 + num_top :].contiguous().view(torch.float32)
    torch.testing.assert_close(values, expected.gather(1, top.long()), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("apply", [apply_token_masks, apply_token_masks_reference])
def test_token_masks(apply: Callable[..., None], device: torch.device) -> None:
    """Only tokens whose bit is set are left; every row has its own mask, or none."""
    vocab = 1100
    masks = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), dtype=torch.int32)
    masks[2] = -1
    places = torch.tensor([3, 2, -1, 0], dtype=torch.int32)
    logits = torch.randn(4, vocab)
    expected = logits.clone()
    for row, place in enumerate(places.tolist()):
        for token in range(vocab):
            if place >= 0 and not int(masks[place, token // 32]) >> (token % 32) & 1:
                expected[row, token] = -math.inf
    result = logits.to(device)
    apply(result, places.to(device), masks.to(device))
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("apply", [apply_bad_words, apply_bad_words_reference])
def test_bad_words(apply: Callable[..., None], device: torch.device) -> None:
    """The last token of a word is banned when the output ends with the others; the prompt does not count."""
    words = {1: [[4, 5], [5], [9, 8, 7], [2, 2, 2, 2]], 3: [[4, 5, 6]], 0: []}
    word_tokens, word_lens = torch.zeros(4, 300, dtype=torch.int32), torch.zeros(4, 300, dtype=torch.int32)
    for slot, listed in words.items():
        place = 0 if slot == 3 else 250  # words across blocks
        for word in listed:
            word_tokens[slot, place : place + len(word)] = torch.tensor(word)
            word_lens[slot, place + len(word) - 1] = len(word)
            place += len(word)
    tokens = torch.full((4, 20), 2, dtype=torch.int32)
    for slot, prompt_len, output, banned in (
        (1, 3, [], {5}),
        (1, 3, [4], {5}),
        (1, 3, [9, 8], {5, 7}),
        (1, 3, [2, 2], {5}),
        (1, 1, [2, 2, 2], {5, 2}),
        (3, 2, [4, 5], {6}),
        (3, 2, [5, 4], set()),
        (0, 2, [4, 4], set()),
    ):
        tokens[slot, prompt_len : prompt_len + len(output)] = torch.tensor(output, dtype=torch.int32)
        logits = torch.zeros(1, 12, device=device)
        row = [torch.tensor([value], dtype=torch.int32) for value in (slot, prompt_len, len(output))]
        apply(logits, *(tensor.to(device) for tensor in (tokens, *row, word_tokens, word_lens)))
        assert {token for token in range(12) if logits[0, token] == -math.inf} == banned, (slot, output)
