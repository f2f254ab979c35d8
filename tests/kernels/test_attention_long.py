"""What the kernel for long prompts is given to do; what it makes of it is tested on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import target
from kernels.attention_library import LongRow
from kernels.attention_long import (
    LEAST_TILES,
    QUERIES,
    TILE,
    TOGETHER,
    groups,
    is_faster,
    make_work,
    scratch_bytes,
    supports,
)
from kernels.target import Target


def rows_of(*lens: tuple[int, int]) -> tuple[LongRow, ...]:
    """Rows of (queries, context), one behind the other."""
    starts = np.cumsum([0, *(queries for queries, _ in lens)])
    return tuple(LongRow(row, int(start), *of) for row, (start, of) in enumerate(zip(starts, lens, strict=False)))


@pytest.mark.parametrize("q_heads", [8, 16, 32])
@pytest.mark.parametrize(
    "lens",
    [[(1, 1)], [(77, 77)], [(300, 1000)], [(8192, 8192)], [(8192, 65536)], [(6872, 15064)], [(128, 5000), (129, 129)],
     [(2048, 2048)] * 4, [(64, 15064)], [(1000, 40000), (50, 60)]],
)  # fmt: skip
def test_work_covers_what_queries_see(lens: list[tuple[int, int]], q_heads: int) -> None:
    """Each query of a row, with each tile of keys up to its own, once: whole, or in pieces that are merged."""
    rows = rows_of(*lens)
    work = make_work(rows, q_heads, 132)
    tiles = work.spans[:, 5] - work.spans[:, 4]
    assert (np.diff(tiles) <= 0).all()
    assert (tiles > 0).all()
    assert sorted(work.spans[work.spans[:, 6] >= 0, 6]) == list(range(work.pieces))
    pieces_of = {int(token): range(first, first + count) for token, first, count, _ in work.merges if count}
    assert [piece for of in pieces_of.values() for piece in of] == list(range(work.pieces))
    key = 0
    for row in rows:
        seen = 0
        for first in range(0, row.num_queries, QUERIES):
            mine = work.spans[work.spans[:, 0] == row.first_token + first]
            mine = mine[np.argsort(mine[:, 4])]
            count, position = min(QUERIES, row.num_queries - first), row.context_len - row.num_queries + first
            assert (mine[:, 1] == count).all()
            assert (mine[:, 2] == key).all()
            assert (mine[:, 3] == position).all()
            assert mine[0, 4] == 0
            assert mine[-1, 5] == -(-(position + count) // TILE)
            assert (mine[1:, 4] == mine[:-1, 5]).all()
            assert (mine[:, 4] * TILE <= position).all()
            assert list(mine[:, 6]) == list(pieces_of.get(row.first_token + first, [-1]))
            seen += len(mine)
        key += -(-row.context_len // TILE) * TILE
    assert len(work.spans) >= sum(-(-row.num_queries // QUERIES) for row in rows)


@pytest.mark.parametrize(("q_heads", "queries", "context"), [(32, 8192, 131072), (32, 6872, 15064), (16, 8192, 8192)])
def test_programs_end_together(q_heads: int, queries: int, context: int) -> None:
    """Within 3% of what each would have to do if work could be cut anywhere; without cuts it can be far more."""
    spans = make_work(rows_of((queries, context)), q_heads, 132).spans
    tiles = spans[:, 5] - spans[:, 4]
    work = np.repeat(tiles, q_heads)
    mine = [work[place::264].sum() + work[263 - place :: 264].sum() for place in range(132)]
    assert max(mine) <= 1.03 * work.sum() / 132


def test_pieces_are_worth_it() -> None:
    """None of few tiles, and none where all programs are busy anyway."""
    work = make_work(rows_of((8192, 131072)), 32, 132)
    cut = work.spans[work.spans[:, 6] >= 0]
    assert len(cut)
    assert (cut[:, 5] - cut[:, 4] >= LEAST_TILES).all()
    assert make_work(rows_of((8192, 8192)), 32, 132).pieces == 0


def test_rows_go_together_while_their_keys_fit() -> None:
    rows = rows_of((10, 30000), (10, 30000), (10, 70000), (10, 30000), (10, 5000), (10, 30600))
    assert groups(rows) == [rows[:2], rows[2:3], rows[3:5], rows[5:]]
    for group in groups(rows):
        keys = sum(-(-row.context_len // TILE) * TILE for row in group)
        assert len(group) == 1 or keys <= TOGETHER


def test_memory_for_copies_is_known_before() -> None:
    """Of the longest context alone, or of rows that go together."""
    assert scratch_bytes(8192, 131072, 32, 8, 2) >= 2 * 131072 * 8 * 128 * 2
    assert scratch_bytes(8192, 4096, 32, 8, 2) >= 2 * TOGETHER * 8 * 128 * 2


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_absent", Target(90, 132))
    q = torch.empty(4, 32, 128, dtype=torch.bfloat16, device="meta")
    assert supports(q, 0)
    assert supports(q.half(), 0)
    assert not supports(q, 4096)
    assert not supports(q.float(), 0)
    assert not supports(q[:, :, :64], 0)
    assert not supports(torch.empty(4, 32, 128, dtype=torch.bfloat16), 0)
    monkeypatch.setattr(target, "_absent", Target(80, 108))
    assert not supports(q, 0)
    assert is_faster(rows_of((8192, 8192)), 32, 8)
    assert is_faster(rows_of((8192, 131072)), 32, 8)
    assert not is_faster(rows_of((64, 15064)), 32, 8)
    assert not is_faster(rows_of(*[(100, 100)] * 80), 32, 8)
