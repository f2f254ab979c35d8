"""A draft head's chain of guesses: its begin, what is stored and kept, and that it goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.batch.guesses import (
    begin_chain,
    begin_chain_reference,
    keep_features,
    keep_features_reference,
    part_guesses,
    part_guesses_reference,
    store_guesses,
    store_guesses_reference,
)

STORES = [store_guesses, store_guesses_reference]
BEGINS = [begin_chain, begin_chain_reference]
KEEPS = [keep_features, keep_features_reference]
PARTS = [(part_guesses, store_guesses), (part_guesses_reference, store_guesses_reference)]


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize(("lag", "size"), [(1, 24), (0, 0)])
def test_a_chain_begins(begin: Callable[..., None], lag: int, size: int, device: torch.device) -> None:
    """At the last token whose next one is known, up to the last draft; a prompt of one token has none before it."""
    ints = {"dtype": torch.int32, "device": device}
    slots, query_start = torch.tensor([3, 0, 5], **ints), torch.tensor([2, 6, 8, 9], **ints)
    lengths, kept = torch.tensor([1, 7, 7, 40, 7, 12, 9], **ints), torch.rand(7, size, device=device)
    room, features = torch.full((3, 8), 99, **ints), torch.zeros(5, size, device=device)

    begin(slots, query_start, lengths, kept, lag, 6, room[:, :5], features)

    assert room[0].tolist() == [3, 0, 5, 6, 6, 99, 99, 99]
    assert room[1].tolist() == [39 - lag, 0, 11 - lag, -1, -1, 99, 99, 99]
    assert room[2].tolist() == [42, 1, 11, -1, -1, 99, 99, 99]
    assert torch.equal(features, kept[room[0, :5].long()])


@pytest.mark.parametrize("keep", KEEPS)
def test_features_are_kept(keep: Callable[..., None], device: torch.device) -> None:
    """Of a row whose drafts are all right, of one whose first is wrong, of a chunk of a prompt, and of its end."""
    ints = {"dtype": torch.int32, "device": device}
    slots, starts = torch.tensor([2, 0, 3, 1, 4], **ints), torch.tensor([10, 20, 0, 30, 0], **ints)
    query_start, lengths = torch.tensor([0, 3, 6, 8, 11, 11], **ints), torch.tensor([22, 34, 14, 50, 1], **ints)
    features, kept = torch.rand(11, 24, device=device), torch.zeros(5, 24, device=device)

    keep(features, slots, starts, query_start, lengths, kept)

    assert torch.equal(kept[:4], features[torch.tensor([3, 10, 2, 7], device=device)])


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


@pytest.mark.parametrize(("part", "store"), PARTS)
@pytest.mark.parametrize(
    ("vocab", "ranks", "known"), [(37, 2, False), (9001, 3, True), (20000, 2, False), (5, 5, True)]
)
def test_guesses_of_ranks(
    part: Callable[..., torch.Tensor], store: Callable[..., None], vocab: int, ranks: int, known: bool,
    device: torch.device,
) -> None:  # fmt: skip
    """What ranks tell of their parts is the likeliest of all, the first of several, whoever has it."""
    ints = {"dtype": torch.int32, "device": device}
    logits = torch.randn(6, vocab, device=device)
    logits[1, [0, vocab - 1]] = 9.0
    logits[2, vocab // 2 :] = 9.0
    logits[3] = -torch.inf
    logits[3, vocab - 1] = -7.0
    shares = [range(rank * vocab // ranks, (rank + 1) * vocab // ranks) for rank in range(ranks)]
    token_ids = torch.randperm(vocab).to(**ints) if known else None
    told = torch.stack([part(logits[:, own.start : own.stop], own.start) for own in shares])
    assert told.shape == (ranks, 6, 2)
    found = []
    for given in (logits, told):
        tokens, starts = torch.zeros(6, 4, **ints), torch.tensor([0, 1, 2, 0, -1, 1], **ints)
        features = torch.zeros(6, 0, device=device)
        store(given, token_ids, features, tokens, torch.arange(6, **ints), starts, starts + 1, features)
        found.append((tokens, starts))
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
