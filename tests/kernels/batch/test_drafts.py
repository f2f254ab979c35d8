"""Drafts on the device: where rows begin, what is accepted, what is looked up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.batch.draft_lookup import (
    look_up_drafts,
    look_up_drafts_on_cpu,
    look_up_drafts_reference,
    store_drafts_reference,
)
from pagebus.kernels.batch.drafts import (
    accept_drafts,
    accept_drafts_on_cpu,
    accept_drafts_reference,
    resolve_starts,
    resolve_starts_on_cpu,
    resolve_starts_reference,
)

VOCAB = 50
LOOKUPS = [look_up_drafts, look_up_drafts_reference]
RESOLVES = [resolve_starts, resolve_starts_reference]
ACCEPTS = [accept_drafts, accept_drafts_reference]
if not torch.cuda.is_available():
    LOOKUPS.append(look_up_drafts_on_cpu)
    RESOLVES.append(resolve_starts_on_cpu)
    ACCEPTS.append(accept_drafts_on_cpu)


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("resolve", RESOLVES)
def test_rows_move_back_to_where_they_begin(resolve: Callable[..., None], device: torch.device) -> None:
    """A decode that is sure, one laid out three too late with two drafts, a chunk of a prompt, one that ends it."""
    lengths = ints([9, 21, 7, 40, 12], device)
    slots, starts = ints([0, 4, 3, 2], device), ints([8, 14, 16, 3], device)
    decode_lens = ints([9, 15, 0, 0], device)
    sample_slots, sample_starts = ints([0, 4, 4, 4, 2], device), ints([8, 14, 14, 14, 3], device)
    positions, indexes = ints([9, 15, 16, -1, 7], device), ints([4, 5, 6, 7, 0], device)
    sample_lens = ints([9, 15, 16, 17, 7], device)

    resolve(lengths, slots, starts, decode_lens, sample_slots, sample_starts, positions, indexes, sample_lens)

    assert starts.tolist() == [8, 11, 16, 3]
    assert decode_lens.tolist() == [9, 12, 0, 0]
    assert positions.tolist() == [9, 12, 13, -1, 7]
    assert indexes.tolist() == [4, 2, 3, 4, 0]
    assert sample_lens.tolist() == [9, 12, 13, 14, 7]
    assert lengths.tolist() == [9, 21, 7, 40, 12]


@pytest.mark.parametrize("accept", ACCEPTS)
def test_drafts_are_accepted_up_to_the_first_other_token(
    accept: Callable[..., torch.Tensor], device: torch.device
) -> None:
    """All, none, the first two (the last fits by chance), as many as were found; and rows without any."""
    widths, drafts, found = [4, 4, 4, 4, 1, 1], [[7, 8, 9], [1, 8, 9], [7, 8, 1], [7, 8, 9], [], []], [3, 3, 3, 1, 3, 0]
    expected = [4, 1, 3, 2, 1, 1]
    ids = ints([token for each in drafts for token in (5, *each)], device)
    sampled = ints([token for width in widths for token in [7, 8, 9, 6][:width]] + [0, 0], device)
    begins = [0, *torch.tensor(widths).cumsum(0).tolist()]
    hidden = torch.arange(len(sampled), dtype=torch.int32, device=device).clamp(max=len(ids) - 1)
    indexes = hidden + 3
    slots, lengths = ints([3, 0, 5, 1, 2, 4], device), ints([10, 20, 30, 40, 50, 60, 70], device)
    ready = torch.zeros(7, dtype=torch.int32, device=device)
    ready[slots.long()] = ints(found, device)

    told = accept(sampled, ids, hidden, indexes, ints(begins, device), slots, lengths, ready, 3, begins[-1]).tolist()

    assert told[: begins[-1]] == sampled.tolist()[: begins[-1]]
    assert told[begins[-1] : begins[-1] + 6] == expected
    assert told[begins[-1] + 6 : begins[-1] + 12] == [3 + begin for begin in begins[:-1]]
    assert len(told) == begins[-1] + 18
    grown = {3: 4, 0: 1, 5: 3, 1: 2, 2: 1, 4: 1}
    assert lengths.tolist() == [before + grown.get(slot, 0) for slot, before in enumerate(range(10, 80, 10))]


@pytest.mark.parametrize("accept", ACCEPTS)
def test_rows_without_drafts_become_longer_by_a_token(
    accept: Callable[..., torch.Tensor], device: torch.device
) -> None:
    """Whatever stood ready behind them."""
    lengths, found = ints([10, 20, 30], device), ints([3, 0, 2], device)
    slots, places, sampled = ints([2, 0], device), ints([0, 1, 0], device), ints([7, 8, 0, 0], device)

    told = accept(sampled, ints([1, 2], device), places, ints([4, 9, 0], device), ints([0, 1, 2], device), slots,
                  lengths, found, 3, 2)  # fmt: skip

    assert told.tolist()[:6] == [7, 8, 1, 1, 4, 9]
    assert (len(told), lengths.tolist()) == (8, [11, 20, 31])


def looked_up(text: list[int], told: list[int], count: int, shortest: int, longest: int, room: int) -> list[int]:
    """The drafts behind a text, of which the rest is ``told``, in plain Python."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        for source in (told, text):
            for end in range(len(source) - 1, size - 1, -1):
                if source[end - size : end] != text[len(text) - size :]:
                    continue
                if source is told:
                    return told[end : end + count][:room]
                text = list(text)
                for place in range(count):
                    text.append(text[end + place])
                return text[len(text) - count :][:room]
    return []


ROOM, TOLD_ROOM = 48, 32


@pytest.mark.parametrize("look_up", LOOKUPS)
@pytest.mark.parametrize(("shortest", "longest", "count"), [(1, 3, 4), (2, 5, 1), (3, 3, 7)])
def test_lookup(look_up: Callable[..., None], shortest: int, longest: int, count: int, device: torch.device) -> None:
    """Texts with and without repetition, of one token, with a short period, and at the end of their room. Some have a
    prediction: with their end in it, several times, at its own end, and with something else altogether."""
    rng = random.Random(shortest)
    texts = [[rng.randrange(kinds) for _ in range(size)] for kinds, size in ((2, 30), (4, 40), (VOCAB, 20), (3, 47))]
    texts += [[7], [7, 7], [1, 2, 3] * 5, [4] * (ROOM - 16), [1, 2, 3, 9, 1, 2, 3, 8, 5, 2, 3]]
    predictions = [[rng.randrange(2) for _ in range(TOLD_ROOM)], [], [*texts[2][-4:], 5, 6, 7], [3], [7, 8, 9], [7, 7],
                   [1, 2, 3, 4, 5], [4, 4, 4, 6], [9, 2, 3, 8, 1, 2, 3, 4, 4]]  # fmt: skip
    size = len(texts) + 1
    tokens = torch.randint(0, VOCAB, (size, ROOM + TOLD_ROOM), dtype=torch.int32, device=device)
    slots = torch.randperm(size)[: len(texts)].to(device=device, dtype=torch.int32)
    lengths, predicted = (torch.ones(size, dtype=torch.int32, device=device) for _ in range(2))
    for slot, text, told in zip(slots.tolist(), texts, predictions, strict=True):
        tokens[slot, : len(text)], tokens[slot, ROOM : ROOM + len(told)] = ints(text, device), ints(told, device)
        lengths[slot], predicted[slot] = len(text), len(told)
    found = torch.full((size,), -3, dtype=torch.int32, device=device)
    out = torch.full((len(texts),), -9, dtype=torch.int32, device=device)
    before = tokens.clone()

    look_up(tokens, lengths, found, slots, count, shortest, longest, VOCAB, out, predicted, ROOM)

    for row, (slot, text, told) in enumerate(zip(slots.tolist(), texts, predictions, strict=True)):
        drafts = looked_up(text, told, count, shortest, longest, ROOM + TOLD_ROOM - len(text))
        assert out[row] == found[slot] == len(drafts), text
        before[slot, len(text) : len(text) + len(drafts)] = ints(drafts, device)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("look_up", LOOKUPS)
def test_lookup_in_a_long_text(look_up: Callable[..., None], device: torch.device) -> None:
    """The longest end wins over a later one, across what one pass of the kernel reads; in a long prediction too."""
    text = list(range(3000))
    text[10:14], text[2500:2502], text[2996:] = [7001, 7002, 7003, 7004], [7003, 7004], [7001, 7002, 7003, 7004]
    told = [9] * 1500 + [7000, 7001, 7002, 7003, 7004, 7, 8]
    tokens = torch.zeros((2, 3100 + len(told)), dtype=torch.int32, device=device)
    tokens[:, :3000], tokens[1, 3100:] = ints(text, device), ints(told, device)
    found, out = ints([0, 0], device), ints([0, 0], device)

    look_up(
        tokens, ints([3000, 3000], device), found, ints([0, 1], device), 3, 2, 5, 8000, out,
        ints([0, len(told)], device), 3100,
    )  # fmt: skip

    assert tokens[0, 3000:3003].tolist() == [14, 15, 16]
    assert tokens[1, 3000:3002].tolist() == [7, 8]
    assert found.tolist() == out.tolist() == [3, 2]


def test_drafts_end_where_the_vocabulary_does() -> None:
    """And where there is no room."""
    cpu = torch.device("cpu")
    tokens, lengths = torch.zeros((3, 8), dtype=torch.int32), ints([2, 6, 1], cpu)
    found = ints([9, 9, 9], cpu)

    drafts = torch.tensor([[1, VOCAB, 2], [1, 2, 3], [-1, 1, 2]], dtype=torch.int32)
    store_drafts_reference(tokens, lengths, found, ints([0, 1, 2], cpu), drafts, VOCAB)

    assert found.tolist() == [1, 2, 0]
    assert tokens.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 2], [0] * 8]
