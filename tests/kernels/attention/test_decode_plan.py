"""How decode rows are shared out: every tile once, and evenly."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from pagebus.kernels.attention import decode_plan
from pagebus.kernels.attention.decode_plan import DecodePlan, plan_decodes
from pagebus.kernels.attention.forms.launch import DecodeConfig

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
    apart: bool = False,
    kv_heads: int = 1,
) -> DecodePlan:
    ints = {"dtype": torch.int32, "device": device}
    slots = torch.arange(len(lens), **ints) + 100
    lengths = torch.tensor(lens, **ints)
    config = DecodeConfig(tile, programs, num_warps=4, num_stages=2, apart=apart)
    return plan_decodes(slots, lengths, 2, kv_heads, 32, config, window)


def pieces_of(plan: DecodePlan) -> list[tuple[int, ...]]:
    """The items of all programs in order: row, slot, length, first token, end, whether the row has others."""
    ends = plan.program_items.tolist()
    assert ends[0] == 0
    assert ends == sorted(ends)
    return [tuple(item[:6]) for item in plan.items[: ends[-1]].tolist()]


def first_seen(length: int, window: int) -> int:
    """The first token that the newest of a row sees."""
    if window < 0:
        return max(0, length - 1) // -window * -window
    return max(0, length - window) if window else 0


@pytest.mark.parametrize(("tile", "programs", "apart"), [(16, 7, False), (64, 7, True), (64, 70, True), (32, 50, True)])
@pytest.mark.parametrize("window", [0, 100, -100])
@pytest.mark.parametrize("lens", LENGTHS)
def test_every_token_once(
    lens: list[int], window: int, tile: int, programs: int, apart: bool, device: torch.device
) -> None:
    """The items of a row follow each other from the cut before its first token to its end; a row of nothing has
    none."""
    plan = make_plan(lens, device, window=window, tile=tile, programs=programs, apart=apart)
    by_row = {row: list(items) for row, items in itertools.groupby(pieces_of(plan), key=lambda item: item[0])}
    assert list(by_row) == [row for row, length in enumerate(lens) if length]
    for row, items in by_row.items():
        first = first_seen(lens[row], window)
        assert all(item[1:3] == (100 + row, lens[row]) for item in items)
        assert all(item[5] == (len(items) > 1) for item in items)
        assert items[0][3] in {first // plan.cut * plan.cut, first // tile * tile}
        assert [item[3] for item in items[1:]] == [item[4] for item in items[:-1]]
        assert items[-1][4] == lens[row]
        assert all(item[3] < item[4] and item[3] % plan.cut == 0 for item in items)


def tokens_of(plan: DecodePlan) -> list[list[int]]:
    """The tokens of each program's items."""
    items, ends = pieces_of(plan), plan.program_items.tolist()
    return [[item[4] - item[3] for item in items[begin:end]] for begin, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("lens", LENGTHS)
def test_no_program_has_more_than_its_share(lens: list[int], device: torch.device) -> None:
    """However skewed the lengths are: at most an equal share of all tiles, or the least piece worth cutting."""
    tiles = [sum(-(-each // 16) for each in tokens) for tokens in tokens_of(make_plan(lens, device))]
    total = sum(-(-length // 16) for length in lens)
    assert sum(tiles) == total
    assert max(tiles) <= max(4, -(-total // 7))


@pytest.mark.parametrize(
    ("context", "programs", "pieces", "longest"),
    [(576, 198, 6, 96), (640, 198, 6, 112), (512, 198, 4, 128), (576, 190, 5, 128), (20, 198, 1, 20)],
)
def test_rows_lie_apart(
    context: int, programs: int, pieces: int, longest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tiles in each of 32 rows: six programs of 96 tokens for each row, and not two tiles for some. Of 512 tokens,
    four programs of 128 for each row give the busiest of 132 multiprocessors less than six."""
    monkeypatch.setattr(decode_plan, "num_multiprocessors", lambda _: 132)
    tokens = tokens_of(make_plan([context] * 32, device, tile=64, programs=programs, apart=True, kv_heads=2))
    assert all(len(each) <= 1 for each in tokens)
    assert [sum(map(len, tokens)), max(map(sum, tokens))] == [32 * pieces, longest]


@pytest.mark.parametrize(("lens", "programs"), [([576] * 32, 60), ([3000] * 9, 8), ([64] * 40, 7)])
def test_rows_lie_end_to_end_where_programs_are_few(lens: list[int], programs: int, device: torch.device) -> None:
    """Then both are cut alike."""
    apart = make_plan(lens, device, tile=64, programs=programs, apart=True)
    usual = make_plan(lens, device, tile=64, programs=programs)
    assert pieces_of(apart) == pieces_of(usual)
    assert apart.program_items.tolist() == usual.program_items.tolist()


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
