"""How decode rows are shared out: every tile once, and evenly."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from pagebus.kernels.attention.decode_plan import DecodePlan, plan_decodes

LENGTHS = [
    [1, 300, 64, 0, 129],
    [5000],
    [0, 0],
    [17] * 40,
    [4000, *[30] * 30],
    [random.Random(row).randrange(700) for row in range(33)],
]


def make_plan(
    lens: list[int],
    device: torch.device,
    *,
    tile: int = 16,
    programs: int = 7,
    window: int = 0,
) -> DecodePlan:
    ints = {"dtype": torch.int32, "device": device}
    slots = torch.arange(len(lens), **ints) + 100
    return plan_decodes(slots, torch.tensor(lens, **ints), 2, 32, tile, programs, window)


def pieces_of(plan: DecodePlan) -> list[tuple[int, ...]]:
    """The items of all programs in order: row, slot, length, first tile, end tile, whether the row has others."""
    ends = plan.program_items.tolist()
    assert ends[0] == 0
    assert ends == sorted(ends)
    return [tuple(item[:6]) for item in plan.items[: ends[-1]].tolist()]


@pytest.mark.parametrize("window", [0, 100, -100])
@pytest.mark.parametrize("lens", LENGTHS)
def test_every_tile_once(lens: list[int], window: int, device: torch.device) -> None:
    """The items of a row follow each other from its first tile to its last; a row of nothing has none."""
    plan = make_plan(lens, device, window=window)
    by_row = {row: list(items) for row, items in itertools.groupby(pieces_of(plan), key=lambda item: item[0])}
    assert list(by_row) == [row for row, length in enumerate(lens) if length]
    for row, items in by_row.items():
        first = max(0, lens[row] - window) // 16 if window > 0 else 0
        first = (lens[row] - 1) // -window * -window // 16 if window < 0 else first
        assert all(item[1:3] == (100 + row, lens[row]) for item in items)
        assert all(item[5] == (len(items) > 1) for item in items)
        assert [item[3] for item in items] == [first, *(item[4] for item in items[:-1])]
        assert items[-1][4] == -(-lens[row] // 16)
        assert all(item[3] < item[4] for item in items)


@pytest.mark.parametrize("lens", LENGTHS)
def test_no_program_has_more_than_its_share(lens: list[int], device: torch.device) -> None:
    """However skewed the lengths are: at most an equal share of all tiles, or the least piece worth cutting."""
    plan = make_plan(lens, device)
    items, ends = pieces_of(plan), plan.program_items.tolist()
    tiles = [sum(item[4] - item[3] for item in items[begin:end]) for begin, end in itertools.pairwise(ends)]
    total = sum(-(-length // 16) for length in lens)
    assert sum(tiles) == total
    assert max(tiles) <= max(4, -(-total // 7))


@pytest.mark.parametrize("lens", LENGTHS)
def test_divided_rows_are_merged(lens: list[int], device: torch.device) -> None:
    """The merges name each row with several items, its first one and their number; the rest of the table is empty."""
    plan = make_plan(lens, device)
    numbered = enumerate(pieces_of(plan))
    rows = [(row, list(items)) for row, items in itertools.groupby(numbered, key=lambda item: item[1][0])]
    expected = [[row, items[0][0], len(items)] for row, items in rows if len(items) > 1]
    merges = plan.merges[:, :3].tolist()
    assert merges[: len(expected)] == expected
    assert all(count == 0 for _row, _first, count in merges[len(expected) :])
