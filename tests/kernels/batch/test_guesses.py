"""The end of a draft head's pass: what it guesses is stored, and the chain goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.batch.guesses import store_guesses, store_guesses_reference

STORES = [store_guesses, store_guesses_reference]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("vocab", "known"), [(37, False), (9000, True), (20000, False)])
def test_guesses_are_stored(store: Callable[..., None], vocab: int, known: bool, device: torch.device) -> None:
    """The first of equally likely tokens, by its own name; a chain of nothing stores none, one at its end stays."""
    ints = {"dtype": torch.int32, "device": device}
    logits = torch.rand(4, vocab, device=device)
    best = [vocab - 1, 3, vocab // 2, 0]
    for row, place in enumerate(best):
        logits[row, place] = 2.0
    logits[1, 11::7] = 2.0
    token_ids = torch.randperm(vocab).to(**ints) if known else None
    tokens, slots = torch.zeros(6, 16, **ints), torch.tensor([4, 0, 5, 2], **ints)
    starts, ends = torch.tensor([3, 15, -1, 7], **ints), torch.tensor([9, 15, -1, 8], **ints)
    features, following = torch.zeros(4, 24, device=device), torch.rand(4, 24, device=device)

    store(logits, token_ids, following, tokens[:, :], slots, starts, ends, features)

    names = best if token_ids is None else token_ids[torch.tensor(best, device=device)].tolist()
    expected = torch.zeros(6, 16, **ints)
    expected[4, 3], expected[0, 15], expected[2, 7] = names[0], names[1], names[3]
    assert torch.equal(tokens, expected)
    assert starts.tolist() == [4, 15, -1, 8]
    assert torch.equal(features, following)


@pytest.mark.parametrize("store", STORES)
def test_features_that_stay(store: Callable[..., None], device: torch.device) -> None:
    """Those of a whole model, which have no numbers, and those that the head has changed in place."""
    ints = {"dtype": torch.int32, "device": device}
    for size in (0, 8):
        tokens, starts = torch.zeros(2, 8, **ints), torch.zeros(1, **ints)
        features = torch.rand(1, size, device=device)
        before, logits = features.clone(), torch.eye(5, device=device)[2:3]
        store(logits, None, features, tokens[:, 1:], torch.ones(1, **ints), starts, starts + 1, features)
        assert tokens.tolist() == [[0] * 8, [0, 2, *[0] * 6]]
        assert starts.tolist() == [1]
        assert torch.equal(features, before)
