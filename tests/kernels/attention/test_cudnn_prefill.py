"""Long prompts through a library's attention over copies of the pages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pagebus.kernels.attention import cudnn_prefill
from pagebus.kernels.attention.cudnn_prefill import (
    LongRow,
    Problem,
    batches,
    batches_of_every_shape,
    cudnn_attention,
    faster_parts,
    filled_parts,
    problems,
    supports,
    takes_all,
)
from pagebus.kernels.attention.paged_attention import paged_attention
from tests.kernels.attention.cases import AttentionCase, make_case, naive_attention

pytestmark = pytest.mark.share(6)


def long_rows(case: AttentionCase) -> tuple[LongRow, ...]:
    starts = itertools.accumulate(case.query_lens, initial=0)
    return tuple(
        LongRow(row, first, count, context)
        for row, (first, count, context) in enumerate(zip(starts, case.query_lens, case.context_lens, strict=False))
    )


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_prefill, "PIECES", (8, 16))
    monkeypatch.setattr(cudnn_prefill, "SEGMENTS", (32, 16, 8))


@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [([24], [24]), ([21], [21]), ([40], [16]), ([101], [13]), ([96], [96]), ([150, 9, 64], [37, 9, 2]),
     ([16, 16, 16], [16, 16, 16]), ([30, 16, 8, 13, 16, 40, 6], [1, 16, 8, 13, 16, 4, 6]), ([16, 15], [15, 12])],
)  # fmt: skip
@pytest.mark.usefixtures("small_sizes")
def test_what_fills_pieces_is_left_to_the_library(
    context_lens: list[int], query_lens: list[int], device: torch.device
) -> None:
    """And the rest to our kernel: whole prompts and chunks that begin and end anywhere, one row or several, beside
    decodes, in every number of segments; keys and values of new tokens out of the pages, or where they were made;
    with and without a place for the result."""
    case = make_case(context_lens, query_lens, q_heads=4, kv_heads=2, head_dim=32, device=device)
    parts, words = filled_parts(long_rows(case), 8), case.keywords
    assert parts
    out = torch.full(case.q.shape, torch.nan, device=device)
    ways = [(None, case.projected()), (out, None)]
    if len(query_lens) > 3:  # the place and the source are independent: all four once
        ways += [(None, None), (out, case.projected())]
    for given, projected in ways:
        result = paged_attention(
            case.q, case.k_cache, case.v_cache, **words, long_rows=parts, projected=projected, out=given
        )
        torch.testing.assert_close(result.double(), naive_attention(case), atol=3e-6, rtol=1e-4)
        assert given is None or result is out
        out.fill_(torch.nan)


@pytest.mark.usefixtures("small_sizes")
def test_new_tokens_are_not_copied_out_of_the_pages(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If their keys and values are at hand; what lies before them is."""
    case = make_case([24, 40], [24, 16], q_heads=4, kv_heads=2, head_dim=32, device=device)
    copied: list[tuple[int, int]] = []
    gather = cudnn_prefill.gather_tokens

    def noting(
        k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, first: int, k_out: torch.Tensor, *rest: Any
    ) -> None:
        copied.append((first, len(k_out)))
        gather(k, v, slots, first, k_out, *rest)

    monkeypatch.setattr(cudnn_prefill, "gather_tokens", noting)
    arguments = (case.keywords["slots"], case.keywords["block_tables"], case.keywords["scale"], long_rows(case))
    result = cudnn_attention(
        case.q, case.k_cache, case.v_cache, torch.empty_like(case.q), *arguments, projected=case.projected()
    )
    torch.testing.assert_close(result.double(), naive_attention(case), atol=3e-6, rtol=1e-4)
    assert copied == [(0, 16), (16, 8)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.usefixtures("small_sizes")
def test_the_library_over_a_cache_of_one_byte(dtype: torch.dtype, device: torch.device) -> None:
    """Keys and values are widened on the way out of the pages."""
    case = make_case([104], [16], q_heads=4, kv_heads=2, head_dim=32, cache_dtype=dtype, device=device)
    words = case.keywords
    arguments = (words["slots"], words["block_tables"], words["scale"], long_rows(case), words["kv_scales"])
    result = cudnn_attention(case.q, case.k_cache, case.v_cache, None, *arguments)
    torch.testing.assert_close(result.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("queries", "context", "part"),
    [
        (8, 8, (5, 8, 8)),
        (13, 101, (5, 8, 96)),
        (7, 7, None),
        (9, 17, (5, 8, 16)),
        (5, 1000, None),
        (30, 60, (7, 24, 56)),
    ],
)
@pytest.mark.usefixtures("small_sizes")
def test_what_fills_pieces(queries: int, context: int, part: tuple[int, int, int] | None) -> None:
    """Of a row whose queries begin at token 5 of the pass: first token, number of queries, context."""
    assert filled_parts((LongRow(2, 5, queries, context),), 8) == (() if part is None else (LongRow(2, *part),))


@pytest.mark.parametrize(("most_queries", "longest"), [(16, 100), (20, 60), (8, 30), (5, 70), (16, 9)])
@pytest.mark.usefixtures("small_sizes")
def test_every_shape_is_known_before(monkeypatch: pytest.MonkeyPatch, most_queries: int, longest: int) -> None:
    """Rows of any length anywhere ask the library for nothing that the rows made for it did not, and those for each
    shape only a few times. What rows ask for is told beforehand."""
    shapes: list[tuple[object, ...]] = []
    asked: set[Problem] = set()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool) -> tuple[object, ...]:
        shapes.append((q.shape, q.stride(), k.shape, k.stride(), causal))
        asked.add(Problem(q.shape[0], q.shape[1], k.shape[1], causal))
        return q, q[..., 0]

    monkeypatch.setattr(cudnn_prefill, "_attend", attend)
    monkeypatch.setattr(cudnn_prefill, "gather_tokens", lambda *_: None)
    monkeypatch.setattr(cudnn_prefill, "merge_attention", lambda first, first_lse, *_: (first, first_lse))
    cache, nothing = torch.empty(1, 4, 1, 2), torch.empty(0)

    def run(*lens: tuple[int, int]) -> set[tuple[object, ...]]:
        shapes.clear()
        asked.clear()
        starts = itertools.accumulate((queries for queries, _ in lens), initial=0)
        rows = tuple(LongRow(i, at, *of) for i, (at, of) in enumerate(zip(starts, lens, strict=False)))
        rows = filled_parts(rows, 8)
        q = torch.empty(sum(queries for queries, _ in lens), 4, 2)[:, :2]
        if rows:
            cudnn_attention(q, cache, cache, torch.empty_like(q), nothing, nothing, 1.0, rows)
        assert problems(rows) == asked
        assert len(asked) == len(set(shapes))
        return set(shapes)

    found = batches_of_every_shape(most_queries, longest)
    prepared = [run(*((row.num_queries, row.context_len) for row in rows)) for rows in found]
    assert all(1 <= len(each) <= 2 for each in prepared)
    known = set().union(*prepared)
    for queries, context in itertools.product(range(1, most_queries + 1), range(1, longest + 1)):
        if queries <= context:
            assert run((queries, context)) <= known, (queries, context)
            for count in range(2, most_queries // queries + 1 if context < queries + 8 else 0):
                assert run(*[(queries, context)] * count) <= known, (queries, context, count)


def test_full_steps_of_equal_prompts_are_planned_first() -> None:
    """What comes at once is the likeliest, and a plan that is missing then costs the most."""
    first = batches_of_every_shape(8192, 32768)[:3]
    assert [(len(rows), rows[0].num_queries, rows[0].past) for rows in first] == [
        (1, 8192, 0),
        (2, 4096, 0),
        (4, 2048, 0),
    ]


def test_which_rows_go_together() -> None:
    """Rows without a past that are equally long and follow each other."""
    rows = (
        LongRow(0, 0, 16, 16), LongRow(1, 16, 16, 16), LongRow(2, 32, 8, 8), LongRow(3, 40, 8, 8), LongRow(4, 50, 8, 8),
        LongRow(6, 58, 8, 8), LongRow(7, 66, 8, 16), LongRow(8, 74, 8, 16),
    )  # fmt: skip
    assert [[row.row for row in batch] for batch in batches(rows)] == [[0, 1], [2, 3], [4], [6], [7], [8]]
    assert takes_all(rows[:2], 32)
    assert not takes_all(rows[:2], 33)
    assert not takes_all(rows[:3], 40)
    assert takes_all(rows[2:3], 8)


def test_when_it_pays() -> None:
    """Long chunks and long pasts do, short prompts do not; what does not fill pieces never does."""

    def part(queries: int, context: int, row: int = 0) -> LongRow:
        return LongRow(row, row * queries, queries, context)

    for queries, context in ((8192, 8192), (8192, 131072), (2048, 32768)):
        assert faster_parts((part(queries, context),), 512, 32, 128) == (part(queries, context),)
    several = tuple(part(2048, 2048, row) for row in range(4))
    assert faster_parts(several, 512, 32, 128) == several
    assert faster_parts(several[:1], 512, 32, 128) == ()
    assert faster_parts((part(8192, 8192), LongRow(1, 8192, 512, 512)), 512, 32, 128) == (part(8192, 8192),)
    assert faster_parts((part(511, 32767),), 512, 32, 128) == ()


def test_what_the_library_computes() -> None:
    """Half precision with heads of up to 128 in multiples of 8; a float8 cache is widened."""
    assert supports(torch.bfloat16, torch.bfloat16, 128)
    assert not supports(torch.float32, torch.float32, 128)
    assert supports(torch.bfloat16, torch.float8_e4m3fn, 128)
    assert not supports(torch.float32, torch.float8_e4m3fn, 128)
    assert not supports(torch.bfloat16, torch.bfloat16, 256)
