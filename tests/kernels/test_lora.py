"""Adapters of segments: what they add is what each token's own adapter adds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagebus.kernels.lora.reference import AdapterTable, expand, shrink
from pagebus.kernels.lora.segments import Segments

CPU = torch.device("cpu")
ADAPTERS, LARGEST, INPUTS, WIDTHS = 3, 4, 8, (6, 2, 2)


def _tables() -> tuple[AdapterTable, AdapterTable]:
    """Ranks 0 to 4, one for each adapter and module."""
    torch.manual_seed(1)
    ranks = torch.tensor([[1, 4, 0], [3, 0, 2], [4, 4, 4]], dtype=torch.int32)
    used = torch.arange(LARGEST) < ranks[..., None]  # [L, J, R]
    a = torch.randn(ADAPTERS, len(WIDTHS) * LARGEST, INPUTS) * used.reshape(ADAPTERS, -1, 1)
    columns = torch.cat([used[:, j : j + 1].expand(-1, width, -1) for j, width in enumerate(WIDTHS)], dim=1)
    b = torch.randn(ADAPTERS, sum(WIDTHS), LARGEST) * columns
    scales = torch.rand(ADAPTERS, len(WIDTHS))
    return AdapterTable(a, ranks, scales, WIDTHS), AdapterTable(b, ranks, scales, WIDTHS)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, ADAPTERS - 1)), min_size=1, max_size=9))
def test_each_token_gets_what_its_adapter_adds(rows: list[tuple[int, int]]) -> None:
    a, b = _tables()
    starts = [0]
    for count, _ in rows:
        starts.append(starts[-1] + count)
    x, y = torch.randn(starts[-1], INPUTS), torch.randn(starts[-1], sum(WIDTHS))
    segments = Segments.of_rows(starts, [place for _, place in rows], len(rows), CPU)
    got = expand(shrink(x, a, segments), b, segments, y.clone())
    places = [place for count, place in rows for _ in range(count)]
    for token, place in enumerate(places):
        wanted = y[token].clone()
        first = 0
        for module, width in enumerate(WIDTHS if place >= 0 else ()):
            rank = int(a.ranks[place, module])
            down = a.values[place, module * LARGEST : module * LARGEST + rank]
            up = b.values[place, first : first + width, :rank]
            wanted[first : first + width] += a.scales[place, module] * (up @ (down @ x[token]))
            first += width
        torch.testing.assert_close(got[token], wanted)


def test_neighbours_with_the_same_adapter_are_one_segment() -> None:
    segments = Segments.of_rows([0, 1, 2, 3, 5, 6], [1, 1, -1, 0, 0], 4, CPU)
    assert int(segments.number) == 2
    assert segments.first_token.tolist() == [0, 3, 0, 0]
    assert segments.count.tolist() == [2, 3, 0, 0]
    assert segments.adapter.tolist() == [1, 0, 0, 0]


def test_more_segments_than_there_is_room_for() -> None:
    with pytest.raises(ValueError, match="there is room for 1"):
        Segments.of_rows([0, 1, 2], [0, 1], 1, CPU)
