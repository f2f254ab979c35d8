"""Long prompts through a library's attention over copies of the pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from kernels import attention_library
from kernels.attention_library import (
    LongRow,
    Problem,
    batches,
    batches_of_every_shape,
    is_faster,
    long_prefill,
    problems,
    supports,
    takes_all,
)
from tests.kernels.attention_cases import AttentionCase, make_case, naive_attention


def long_rows(case: AttentionCase) -> tuple[LongRow, ...]:
    starts = itertools.accumulate(case.query_lens, initial=0)
    return tuple(
        LongRow(row, first, count, context)
        for row, (first, count, context) in enumerate(zip(starts, case.query_lens, case.context_lens, strict=False))
    )


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention_library, "PIECE", 8)
    monkeypatch.setattr(attention_library, "SEGMENTS", (32, 16, 8))
    yield
    for asked in (batches, takes_all, is_faster, attention_library._is_filled):  # their answers hold for these sizes
        asked.cache_clear()


@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [([24], [24]), ([21], [21]), ([40], [16]), ([101], [13]), ([96], [96]), ([150, 9, 64], [37, 9, 1]),
     ([16, 16, 16], [16, 16, 16]), ([16, 8, 13, 16, 40, 6], [16, 8, 13, 16, 4, 6]), ([16, 15], [15, 12])],
)  # fmt: skip
def test_long_prefill_is_attention(context_lens: list[int], query_lens: list[int], device: torch.device) -> None:
    """Whole prompts and chunks that begin and end anywhere, one row or several, in every number of segments."""
    case = make_case(context_lens, query_lens, q_heads=4, kv_heads=2, head_dim=32, device=device)
    words, out = case.keywords, torch.full(case.q.shape, torch.nan, device=device)
    arguments = (words["slots"], words["block_tables"], words["scale"], long_rows(case))
    result = long_prefill(case.q, case.k_cache, case.v_cache, out, *arguments)
    assert result is out
    torch.testing.assert_close(out.double(), naive_attention(case), atol=3e-6, rtol=1e-4)
    if takes_all(long_rows(case), len(case.q)):
        result = long_prefill(case.q, case.k_cache, case.v_cache, None, *arguments)
        torch.testing.assert_close(result.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_long_prefill_over_a_float8_cache(dtype: torch.dtype, device: torch.device) -> None:
    """Keys and values are widened on the way out of the pages."""
    case = make_case([101], [13], q_heads=4, kv_heads=2, head_dim=32, cache_dtype=dtype, device=device)
    words = case.keywords
    arguments = (words["slots"], words["block_tables"], words["scale"], long_rows(case), words["kv_scales"])
    result = long_prefill(case.q, case.k_cache, case.v_cache, None, *arguments)
    torch.testing.assert_close(result.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize(("queries", "context"), [(8, 8), (13, 101), (7, 7), (9, 17), (5, 1000)])
def test_sizes_fill_pieces(queries: int, context: int) -> None:
    """The causal part holds all new tokens, and what lies before it is whole pieces."""
    row = LongRow(0, 0, queries, context)
    assert row.past % 8 == row.square % 8 == 0
    assert row.past + row.repeated + queries == context
    assert 0 <= row.square - row.repeated - queries < 8


@pytest.mark.parametrize(("most_queries", "longest"), [(16, 100), (20, 60), (8, 30), (5, 70), (16, 9)])
def test_every_shape_is_known_before(monkeypatch: pytest.MonkeyPatch, most_queries: int, longest: int) -> None:
    """Rows of any length anywhere ask the library for nothing that the rows made for it did not, and those for each
    shape only a few times. What rows ask for is told beforehand."""
    shapes: list[tuple[object, ...]] = []
    asked: set[Problem] = set()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool) -> tuple[object, ...]:
        shapes.append((q.shape, q.stride(), k.shape, k.stride(), causal))
        asked.add(Problem(q.shape[0], q.shape[1], k.shape[1], q.stride(1) == 8, causal))
        return q, q[..., 0]

    monkeypatch.setattr(attention_library, "_attend", attend)
    monkeypatch.setattr(attention_library, "gather_tokens", lambda *_: None)
    monkeypatch.setattr(attention_library, "merge_attention", lambda first, first_lse, *_: (first, first_lse))
    cache, nothing = torch.empty(1, 4, 1, 2), torch.empty(0)

    def run(*lens: tuple[int, int]) -> set[tuple[object, ...]]:
        shapes.clear()
        asked.clear()
        starts = itertools.accumulate((queries for queries, _ in lens), initial=0)
        rows = tuple(LongRow(i, start, *of) for i, (start, of) in enumerate(zip(starts, lens, strict=False)))
        q = torch.empty(sum(queries for queries, _ in lens), 4, 2)[:, :2]
        long_prefill(q, cache, cache, torch.empty_like(q), nothing, nothing, 1.0, rows)
        assert problems(rows) == asked
        assert len(asked) == len(set(shapes))
        return set(shapes)

    found = batches_of_every_shape(most_queries, longest)
    prepared = [run(*((row.num_queries, row.context_len) for row in rows)) for rows in found]
    assert all(len(each) <= 2 for each in prepared)
    known = set().union(*prepared)
    for queries, context in itertools.product(range(1, most_queries + 1), range(1, longest + 1)):
        if queries <= context:
            assert run((queries, context)) <= known, (queries, context)
            for count in range(2, most_queries // queries + 1 if context < queries + 8 else 0):
                assert run(*[(queries, context)] * count) <= known, (queries, context, count)


def test_which_rows_go_together() -> None:
    """Rows without whole pieces before them, whose squares are alike and nearly full; filled ones need no copies."""
    sizes = [(16, 16), (8, 8), (13, 13), (9, 9), (12, 14), (16, 40), (7, 7)]
    rows = tuple(LongRow(i, 0, *of) for i, of in enumerate(sizes))
    assert [[row.row for row in batch] for batch in batches(rows)] == [[0, 2, 4], [1, 6], [3], [5]]
    assert takes_all((LongRow(0, 0, 16, 16), LongRow(1, 16, 16, 16)), 32)
    assert not takes_all((LongRow(0, 0, 16, 16), LongRow(1, 16, 15, 15)), 31)
    assert not takes_all((LongRow(0, 0, 16, 16), LongRow(1, 16, 8, 8)), 24)
    assert takes_all((LongRow(0, 0, 13, 101),), 13)
    assert not takes_all((LongRow(0, 1, 13, 101),), 14)


def test_the_layers_of_a_step_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster for some rows is worked out once, and again for other rows."""
    worked_out: list[object] = []
    monkeypatch.setattr(attention_library, "gain_s", lambda rows, *_: worked_out.append(rows) or 1.0)

    def rows(count: int) -> tuple[LongRow, ...]:
        return tuple(LongRow(i, 16 * i, 16, 16) for i in range(count))

    assert [is_faster(rows(count), 4, 32) for count in (2, 2, 3, 2, 3)] == [True] * 5
    assert worked_out == [rows(2), rows(3)]


def test_when_it_pays() -> None:
    """Long chunks and long pasts do, short prompts do not; float32, windows and wide heads have no kernel."""
    attention_library.PIECE = 2048
    assert is_faster((LongRow(0, 0, 8192, 8192),), 32, 128)
    assert is_faster((LongRow(0, 0, 8192, 131072),), 32, 128)
    assert is_faster((LongRow(0, 0, 2048, 32768),), 32, 128)
    assert is_faster(tuple(LongRow(i, 2048 * i, 2048, 2048) for i in range(4)), 32, 128)
    assert not is_faster((LongRow(0, 0, 512, 512),), 32, 128)
    assert not is_faster(tuple(LongRow(i, 512 * i, 512, 512) for i in range(16)), 32, 128)
    assert not is_faster((LongRow(0, 0, 64, 32768),), 32, 128)
    cache = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16)
    q = torch.empty(1, 32, 128, dtype=torch.bfloat16)
    assert supports(q, cache, 0)
    assert not supports(q, cache, 100)
    assert not supports(q.float(), cache.float(), 0)
    assert supports(q, cache.to(torch.float8_e4m3fn), 0)
    assert not supports(q.float(), cache.to(torch.float8_e4m3fn), 0)
    assert not supports(q.new_empty(1, 8, 256), cache.new_empty(1, 16, 4, 256), 0)
