"""Model inputs from the persistent batch, and what is stored in it: samples, and what a step changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.batch.inputs import (
    prepare_inputs,
    prepare_inputs_on_cpu,
    prepare_inputs_reference,
    store_sampled,
    store_sampled_on_cpu,
    store_sampled_reference,
)
from pagebus.kernels.batch.scatter_words import scatter_words, scatter_words_reference

BLOCK_SIZE = 16
PREPARE = [prepare_inputs, prepare_inputs_reference, prepare_inputs_on_cpu]


def check(
    prepare: Callable[..., None], starts: list[int], query_lens: list[int], padding: int, device: torch.device
) -> None:
    """Compare with a loop over the tokens; outputs begin poisoned."""
    num_rows, num_tokens = len(starts), sum(query_lens) + padding
    tokens = torch.randint(0, 1000, (num_rows + 2, 200), dtype=torch.int32, device=device)
    tables = torch.randint(0, 1 << 27, (num_rows + 2, 13), dtype=torch.int32, device=device)
    slots = torch.randperm(num_rows + 2)[:num_rows].to(device=device, dtype=torch.int32)
    ends = torch.tensor([0, *query_lens]).cumsum(0).to(device=device, dtype=torch.int32)
    ids, positions, mapping = [0] * num_tokens, [0] * num_tokens, [-1] * num_tokens
    token = 0
    for row, (start, count) in enumerate(zip(starts, query_lens, strict=True)):
        slot = int(slots[row])
        for position in range(start, start + count):
            if start >= 0:
                ids[token], positions[token] = int(tokens[slot, position]), position
                block = int(tables[slot, position // BLOCK_SIZE])
                mapping[token] = block * BLOCK_SIZE + position % BLOCK_SIZE
            token += 1
    outputs = {
        "input_ids": torch.full((num_tokens,), -9, dtype=torch.int32, device=device),
        "positions": torch.full((num_tokens,), -9, dtype=torch.int32, device=device),
        "slot_mapping": torch.full((num_tokens,), -9, dtype=torch.int64, device=device),
        "context_lens": torch.full((num_rows,), -9, dtype=torch.int32, device=device),
    }
    row_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    prepare(tokens, tables, slots, row_starts, ends, BLOCK_SIZE, **outputs)
    assert outputs["input_ids"].tolist() == ids
    assert outputs["positions"].tolist() == positions
    assert outputs["slot_mapping"].tolist() == mapping
    lens = [start + count if start >= 0 else 0 for start, count in zip(starts, query_lens, strict=True)]
    assert outputs["context_lens"].tolist() == lens


@pytest.mark.parametrize("prepare", PREPARE)
@pytest.mark.parametrize(
    ("starts", "query_lens", "padding"),
    [
        ([5, 0, 199, 30], [1, 1, 1, 1], 0),
        ([5, 0, 16, 30, 0], [1, 1, 100, 15, 33], 0),
        ([5, 150, 0], [1, 40, 7], 21),
        ([7, -1, -1], [1, 1, 1], 0),
        ([7, 3, 0, 9, 0], [0, 2, 0, 3, 0], 4),
        ([0], [200], 0),
    ],
)
def test_prepare_inputs(
    prepare: Callable[..., None], starts: list[int], query_lens: list[int], padding: int, device: torch.device
) -> None:
    """Decodes, chunks, padding tokens, padding rows and rows without tokens get what a loop would give them."""
    check(prepare, starts, query_lens, padding, device)


@pytest.mark.parametrize("prepare", PREPARE)
def test_prepare_inputs_of_many_rows(prepare: Callable[..., None], device: torch.device) -> None:
    """More rows and tokens than one program of the kernel handles."""
    check(prepare, [row % 150 for row in range(300)], [row % 3 for row in range(300)], 50, device)


@pytest.mark.parametrize("prepare", PREPARE)
def test_each_block_table_has_a_mapping(prepare: Callable[..., None], device: torch.device) -> None:
    """Tables that lie apart, and mappings with room behind them, which is left alone."""
    ints, count = {"dtype": torch.int32, "device": device}, 5
    tables = torch.arange(3 * 64, **ints).view(3, 4, 16)[:, :, :13]
    mappings = torch.full((3, 8), -9, device=device)
    outputs = {name: torch.zeros(count, **ints) for name in ("input_ids", "positions")}
    outputs["context_lens"] = torch.zeros(2, **ints)
    slots, starts, ends = (torch.tensor(each, **ints) for each in ([2, 1], [14, 100], [0, 4, 5]))
    tokens = torch.ones((4, 200), **ints)
    prepare(tokens, tables, slots, starts, ends, BLOCK_SIZE, slot_mapping=mappings[:, :count], **outputs)
    for table in range(3):
        places = [(2, 14), (2, 15), (2, 16), (2, 17), (1, 100)]
        expected = [int(tables[table, slot, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for slot, at in places]
        assert mappings[table].tolist() == [*expected, -9, -9, -9]
    assert outputs["positions"].tolist() == [14, 15, 16, 17, 100]


@pytest.mark.parametrize("prepare", PREPARE)
def test_no_block_is_not_written(prepare: Callable[..., None], device: torch.device) -> None:
    """A token whose block table entry is negative is mapped nowhere."""
    ints = {"dtype": torch.int32, "device": device}
    outputs = {name: torch.full((1,), 9, **ints) for name in ("input_ids", "positions", "context_lens")}
    mapping = torch.full((1,), 9, device=device)
    tables, zeros = torch.full((1, 1), -1, **ints), torch.zeros(1, **ints)
    prepare(torch.ones((1, 8), **ints), tables, zeros, zeros, torch.tensor([0, 1], **ints), 16,
            slot_mapping=mapping, **outputs)  # fmt: skip
    assert mapping.tolist() == [-1]
    assert outputs["context_lens"].tolist() == [1]


@pytest.mark.parametrize("store", [store_sampled, store_sampled_reference, store_sampled_on_cpu])
def test_store_sampled(store: Callable[..., None], device: torch.device) -> None:
    """Tokens go to their slots and positions, those with a negative position nowhere."""
    tokens = torch.zeros((4, 9), dtype=torch.int32, device=device)
    ints = {"dtype": torch.int32, "device": device}
    store(tokens, torch.tensor([2, 0, 3], **ints), torch.tensor([8, -1, 0], **ints), torch.tensor([7, 8, 9], **ints))
    expected = torch.zeros_like(tokens)
    expected[2, 8], expected[3, 0] = 7, 9
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("scatter", [scatter_words, scatter_words_reference])
@pytest.mark.parametrize("count", [0, 1, 255, 257, 1000])
def test_scattered_words_go_to_their_places(scatter: Callable[..., None], count: int, device: torch.device) -> None:
    """Whatever their number, and nothing else changes; the lists may begin anywhere."""
    words = torch.full((2000,), -9, dtype=torch.int32, device=device)
    places = torch.randperm(2000, dtype=torch.int32)
    expected = words.tolist()
    for i, place in enumerate(places[3 : 3 + count].tolist()):
        expected[place] = 3 + i

    scatter(
        words, places.to(device)[3 : 3 + count], torch.arange(2000, dtype=torch.int32, device=device)[3 : 3 + count]
    )

    assert words.tolist() == expected
