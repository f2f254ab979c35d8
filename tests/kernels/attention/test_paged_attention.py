"""Paged attention: the reference against the definition, the kernels against the reference."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagebus.kernels.attention import prefill
from pagebus.kernels.attention.decode import decode_attention
from pagebus.kernels.attention.decode_plan import plan_decodes
from pagebus.kernels.attention.forms.launch import DecodeConfig
from pagebus.kernels.attention.paged_attention import (
    AttentionShape,
    Spans,
    cut_prompts,
    cut_prompts_invariant,
    graph_configs,
    paged_attention,
    paged_attention_invariant,
    paged_attention_reference,
    plan_attention,
)
from pagebus.kernels.attention.prefill import plan_prefills, prefill_attention
from pagebus.kernels.attention.prefill_plan import PrefillConfig, fixed_config, query_ranges, query_spans
from tests.kernels.attention.cases import AttentionCase, make_case, naive_attention

pytestmark = pytest.mark.share(6)

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = {"context_lens": [17, 1, 64, 90, 40, 75, 33], "query_lens": [1, 1, 1, 1, 40, 13, 2]}

CASES: dict[str, dict[str, Any]] = {
    "mixed": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64},
    "window": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "window": 20},
    "window_longer_than_context": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "window": 1000},
    "window_of_one": {**MIXED, "q_heads": 2, "kv_heads": 2, "head_dim": 32, "window": 1},
    "chunks": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "window": -20},
    "chunks_longer_than_context": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "window": -1000},
    "half_chunks_int8": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": -50,
                         "cache_dtype": torch.int8},
    "half_precision": {**MIXED, "q_heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": torch.float16},
    "half_window": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": 50},
    "decode_only": {"context_lens": [1, 200, 33], "query_lens": [1, 1, 1], "q_heads": 5, "kv_heads": 1, "head_dim": 64},
    "prefill_only": {"context_lens": [70, 35], "query_lens": [70, 35], "q_heads": 7, "kv_heads": 7, "head_dim": 64},
    "wide_group": {"context_lens": [40, 9], "query_lens": [1, 4], "q_heads": 20, "kv_heads": 1, "head_dim": 32},
    "head_80_block_48": {"context_lens": [100, 50], "query_lens": [1, 30], "q_heads": 3, "kv_heads": 1, "head_dim": 80,
                         "block_size": 48},
    "head_96_block_32": {"context_lens": [100, 50], "query_lens": [1, 30], "q_heads": 14, "kv_heads": 2, "head_dim": 96,
                         "block_size": 32},
    "head_256": {"context_lens": [40, 20], "query_lens": [1, 20], "q_heads": 2, "kv_heads": 1, "head_dim": 256,
                 "dtype": torch.float16},
    "float8": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "cache_dtype": torch.float8_e4m3fn},
    "float8_half_window": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": 50,
                           "cache_dtype": torch.float8_e5m2},
    "softcap": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "softcap": 0.7},
    "softcap_half_window": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": 50,
                            "softcap": 1.5},
    "softcap_float8": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "cache_dtype": torch.float8_e4m3fn,
                       "softcap": 0.7},
    "softcap_int8": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "cache_dtype": torch.int8, "softcap": 0.7},
    "softcap_int8_half": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16,
                          "cache_dtype": torch.int8, "softcap": 0.7},
    "sinks": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "sinks": True},
    "sinks_half_window": {**MIXED, "q_heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16, "window": 20,
                          "sinks": True},
    "sinks_float8": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "cache_dtype": torch.float8_e4m3fn,
                     "sinks": True},
    "sinks_int8_half_window": {**MIXED, "q_heads": 5, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16,
                               "window": 50, "cache_dtype": torch.int8, "sinks": True},
    "sinks_softcap_padded": {"context_lens": [30, 0, 25, 0, 0], "query_lens": [1, 1, 11, 0, 2], "q_heads": 4,
                             "kv_heads": 2, "head_dim": 32, "padding": 5, "softcap": 0.7, "sinks": True},
    "int8": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "cache_dtype": torch.int8},
    "int8_half_window": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": 50,
                         "cache_dtype": torch.int8},
    "int8_half_block_48": {**MIXED, "q_heads": 9, "kv_heads": 1, "head_dim": 80, "dtype": torch.float16,
                           "block_size": 48, "cache_dtype": torch.int8},
    "int8_half_block_128": {**MIXED, "q_heads": 2, "kv_heads": 2, "head_dim": 16, "dtype": torch.float16,
                            "block_size": 128, "cache_dtype": torch.int8, "padding": 3},
    "int8_head_256": {"context_lens": [40, 20], "query_lens": [1, 20], "q_heads": 2, "kv_heads": 1, "head_dim": 256,
                      "dtype": torch.float16, "cache_dtype": torch.int8},
    "padded_tokens": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "padding": 19},
    "padded_decodes": {"context_lens": [30, 0, 5, 0], "query_lens": [1, 1, 1, 1], "q_heads": 4, "kv_heads": 2,
                       "head_dim": 32, "padding": 3},
    "padded_rows": {"context_lens": [30, 0, 25, 0, 0], "query_lens": [1, 1, 11, 0, 2], "q_heads": 4, "kv_heads": 2,
                    "head_dim": 32, "padding": 5},
}  # fmt: skip


def poisoned(case: AttentionCase) -> torch.Tensor:
    return torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device=case.q.device)


@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_definition(name: str, device: torch.device) -> None:
    """The batched reference gives what one query at a time gives, whatever lies past the rows' ends."""
    case = make_case(**CASES[name], device=device)
    result = paged_attention_reference(case.q, case.k_cache, case.v_cache, **case.keywords, out=poisoned(case))
    torch.testing.assert_close(result.double(), naive_attention(case), atol=TOLERANCE[case.q.dtype], rtol=1e-3)


INVARIANT_CASES = (
    "half_window", "chunks", "wide_group", "head_96_block_32", "softcap", "float8", "int8_half_window",
    "padded_decodes", "padded_rows", "sinks", "sinks_half_window", "sinks_int8_half_window", "sinks_softcap_padded",
)  # fmt: skip


@pytest.mark.parametrize(("name", "attend"), [
    *((name, paged_attention) for name in CASES), *((name, paged_attention_invariant) for name in INVARIANT_CASES)
])  # fmt: skip
def test_kernel_is_the_reference(name: str, attend: Callable[..., torch.Tensor], device: torch.device) -> None:
    """The kernels together, or the one that takes all rows, write every token with a context, as the reference does."""
    case = make_case(**CASES[name], device=device)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, **case.keywords)
    result = attend(case.q, case.k_cache, case.v_cache, **case.keywords, out=poisoned(case))
    live = case.live()
    torch.testing.assert_close(result[live], expected[live], atol=TOLERANCE[case.q.dtype], rtol=1e-3)


LONG_CASES: dict[str, dict[str, Any]] = {
    "long": {"context_lens": [40, 500, 30, 400], "query_lens": [1, 21, 17, 3], "q_heads": 4, "kv_heads": 2,
             "head_dim": 64},
    "long_window": {"context_lens": [40, 700, 30], "query_lens": [1, 21, 30], "q_heads": 2, "kv_heads": 1,
                    "head_dim": 64, "window": 150},
    "long_chunks": {"context_lens": [40, 700, 30], "query_lens": [1, 21, 30], "q_heads": 2, "kv_heads": 1,
                    "head_dim": 64, "window": -150},
    "long_softcap": {"context_lens": [40, 500, 30, 400], "query_lens": [1, 21, 17, 3], "q_heads": 4, "kv_heads": 2,
                     "head_dim": 64, "softcap": 0.7},
    "long_sinks": {"context_lens": [40, 500, 900, 400], "query_lens": [1, 1, 17, 3], "q_heads": 4, "kv_heads": 2,
                   "head_dim": 64, "sinks": True},
    "long_sinks_window": {"context_lens": [700, 700, 30], "query_lens": [1, 21, 30], "q_heads": 2, "kv_heads": 1,
                          "head_dim": 64, "window": 150, "sinks": True},
    "long_sinks_half_int8": {"context_lens": [400, 500], "query_lens": [1, 70], "q_heads": 2, "kv_heads": 2,
                             "head_dim": 64, "dtype": torch.float16, "cache_dtype": torch.int8, "sinks": True},
    "long_half_float8": {"context_lens": [1, 500], "query_lens": [1, 70], "q_heads": 2, "kv_heads": 2, "head_dim": 80,
                         "dtype": torch.float16, "cache_dtype": torch.float8_e4m3fn},
    "long_half_int8": {"context_lens": [1, 500], "query_lens": [1, 70], "q_heads": 2, "kv_heads": 2, "head_dim": 80,
                       "dtype": torch.float16, "cache_dtype": torch.int8},
}  # fmt: skip
"""With rows so long that they are cut where pieces may be short."""


@pytest.mark.parametrize("name", [*CASES, *LONG_CASES])
def test_a_pass_of_fixed_shape_gives_the_same(name: str, device: torch.device) -> None:
    """Rows are told apart on the device alone; rows, tokens, blocks of queries, and merges of pieces beyond the step's
    are harmless."""
    case = make_case(**(CASES | LONG_CASES)[name], device=device)
    words, num_rows = case.keywords, len(case.context_lens)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, **words)
    q_heads, head_dim = case.q.shape[1:]
    float8 = words["kv_scales"] is not None
    config = fixed_config(head_dim, case.q.element_size(), float8=float8)
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    cut = query_spans(starts, lens, query_ranges(starts, words["num_decodes"]), config, shares=8, least_keys=128)
    assert (len(cut.merges) > 0) == (name in LONG_CASES)
    num_tokens, live = sum(case.query_lens), case.live()
    decodes = torch.arange(num_rows, device=device) < words["num_decodes"]
    pad = torch.nn.functional.pad
    padded = words | {
        "slots": pad(words["slots"], (0, 3)),
        "query_start": pad(words["query_start"], (0, 3), value=num_tokens),
        "context_lens": pad(words["context_lens"], (0, 3)),
        "num_decodes": num_rows + 3,
        "decode_lens": pad(torch.where(decodes, words["context_lens"], 0), (0, 3)),
    }
    shape = AttentionShape(
        q_heads, case.k_cache.shape[2], head_dim, case.q.element_size(), frozenset({words["sliding_window"]}),
        float8=float8,
    )  # fmt: skip
    spans = pad(torch.from_numpy(cut.spans), (0, 0, 0, 4), value=-1).to(device)
    merges = pad(torch.from_numpy(cut.merges), (0, 0, 0, 2)).to(device)
    plan = plan_attention(padded["slots"], padded["decode_lens"], shape, Spans(config, spans, merges))
    pieces = plan_prefills(spans, merges, config, q_heads, head_dim, 32)
    padded["plan"] = dataclasses.replace(plan, prefills=pieces)
    q = torch.cat((case.q[:num_tokens], torch.full_like(case.q[:1], torch.nan).expand(num_rows + 3, -1, -1)))
    for attend in (paged_attention, paged_attention_reference):
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=device)
        attend(q, case.k_cache, case.v_cache, **padded, out=out)
        torch.testing.assert_close(out[live], expected[live], atol=TOLERANCE[case.q.dtype], rtol=1e-3)


def test_few_tokens_behind_a_long_past_in_a_graph(device: torch.device) -> None:
    """In a launch shape of its own: beside a decode, keys in pieces, and more rows, spans and merges than needed."""
    case = make_case([70, 1500, 40], [1, 9, 3], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.float16, device=device)
    words, shape = case.keywords, AttentionShape(8, 2, 64, 2)
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    cut = cut_prompts(starts, lens, 1, shape, device, 33, config=graph_configs(shape)[True])
    assert (cut.config.heads, len(cut.merges)) == (4, 1)
    pad = torch.nn.functional.pad
    spans = Spans(
        cut.config, pad(torch.from_numpy(cut.spans), (0, 0, 0, 33 - len(cut.spans)), value=-1).to(device),
        pad(torch.from_numpy(cut.merges), (0, 0, 0, 1)).to(device),
    )  # fmt: skip
    padded = words | {
        "slots": pad(words["slots"], (0, 2)),
        "query_start": pad(words["query_start"], (0, 2), value=13),
        "context_lens": pad(words["context_lens"], (0, 2)),
        "num_decodes": 5,
        "decode_lens": pad(words["context_lens"][:1], (0, 4)),
    }
    padded["plan"] = plan_attention(padded["slots"], padded["decode_lens"], shape, spans)
    out = paged_attention(case.q, case.k_cache, case.v_cache, **padded)
    torch.testing.assert_close(out[:13].double(), naive_attention(case)[:13], atol=2e-3, rtol=1e-3)


def test_reference_in_bfloat16() -> None:
    """The reference keeps its softmax in float32 when the cache does not."""
    case = make_case(**MIXED, q_heads=6, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    result = paged_attention_reference(case.q, case.k_cache, case.v_cache, **case.keywords)
    torch.testing.assert_close(result.double(), naive_attention(case), atol=2e-2, rtol=2e-2)


def test_reference_with_very_different_lengths() -> None:
    """One long context among short ones: rows are grouped by length, and land where they belong."""
    lens = [3, 2000, 17, 5, 9, 31, 12, 8, 700, 1]
    case = make_case(lens, [1] * len(lens), q_heads=4, kv_heads=2, head_dim=16)
    result = paged_attention_reference(case.q, case.k_cache, case.v_cache, **case.keywords)
    torch.testing.assert_close(result.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("tile", "programs", "block_size", "apart"),
    [(16, 1, 16, False), (16, 5, 128, False), (64, 3, 48, False), (32, 40, 16, False), (64, 40, 16, True),
     (64, 20, 24, True), (32, 40, 64, True)],
)  # fmt: skip
@pytest.mark.parametrize("sinks", [False, True])
def test_any_plan_gives_the_same(
    tile: int, programs: int, block_size: int, apart: bool, sinks: bool, device: torch.device
) -> None:
    """However rows are cut and shared out, also to more programs than there are tiles, the result is the same; tiles
    have several blocks, or parts of them. A sink counts once for each row."""
    case = make_case(
        [1, 900, 64, 0, 129], [1] * 5, q_heads=6, kv_heads=2, head_dim=32, block_size=block_size, window=800,
        sinks=sinks, device=device,
    )  # fmt: skip
    words, out = case.keywords, poisoned(case)
    config = DecodeConfig(tile, programs, num_warps=2, num_stages=2, apart=apart)
    plan = plan_decodes(words["slots"], words["context_lens"], 6, 2, 32, config, 800)
    decode_attention(
        case.q, case.k_cache, case.v_cache, out, words["block_tables"], words["scale"], 800, plan,
        sinks=words["sinks"],
    )  # fmt: skip
    live = case.live()
    torch.testing.assert_close(out[live].double(), naive_attention(case)[live], atol=3e-6, rtol=1e-4)


def alone(case: AttentionCase, row: int, first: int, count: int) -> dict[str, Any]:
    """Arguments for ``count`` queries of one row, from its ``first`` on, without any other row."""
    words, begin = case.keywords, sum(case.query_lens[:row])
    device = case.q.device
    return words | {
        "q": case.q[begin + first : begin + first + count],
        "slots": words["slots"][row : row + 1],
        "query_start": torch.tensor([0, count], dtype=torch.int32, device=device),
        "context_lens": words["context_lens"][row : row + 1] - (case.query_lens[row] - first - count),
        "num_decodes": int(count == 1),
    }


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("q_heads", [2, 6])
def test_invariant_tokens_do_not_know_each_other(q_heads: int, window: int, device: torch.device) -> None:
    """Every bit of a token is the same decoded alone, in company, and computed again in a chunk of any size."""
    case = make_case(
        [700, 33, 1, 90, 40], [1, 1, 1, 90, 21], q_heads=q_heads, kv_heads=2, head_dim=32, dtype=torch.float16,
        window=window, sinks=window > 0, device=device,
    )  # fmt: skip
    caches = {"k_cache": case.k_cache, "v_cache": case.v_cache}
    together = paged_attention_invariant(case.q, **caches, **case.keywords)
    for row, count in enumerate(case.query_lens):
        begin = sum(case.query_lens[:row])
        for first, end in itertools.pairwise(sorted({0, 1, 2, 3, count // 2, count - 1, count})):
            if first < end <= count:
                result = paged_attention_invariant(**caches, **alone(case, row, first, end - first))
                assert torch.equal(result, together[begin + first : begin + end])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [0, 50])
def test_prompts_cut_for_other_heads(invariant: bool, window: int, device: torch.device) -> None:
    """As those of a model that drafts, which attends to the same rows with fewer and smaller heads: with keys cut into
    pieces, and packed for more heads of a group."""
    case = make_case(
        [1, 300, 3000, 70], [1, 5, 3, 70], q_heads=2, kv_heads=2, head_dim=32, dtype=torch.float16, window=window,
        device=device,
    )  # fmt: skip
    words, theirs = case.keywords, AttentionShape(4, 1, 64, 2)
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    cut = cut_prompts_invariant if invariant else cut_prompts
    cut_rows = cut(starts, lens, 0 if invariant else 1, theirs, device)
    assert (len(cut_rows.merges) > 0, cut_rows.config.heads) == ((False, 4) if invariant else (True, 1))
    decodes = 0 if invariant else 1
    plan = plan_attention(
        words["slots"][:decodes], words["context_lens"][:decodes],
        AttentionShape(2, 2, 32, 2, frozenset({window})), Spans.copied(cut_rows, device),
    )  # fmt: skip
    words |= {"num_decodes": decodes, "plan": plan}
    out = paged_attention(case.q, case.k_cache, case.v_cache, **words)
    torch.testing.assert_close(out.double(), naive_attention(case), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("window", [0, 50, 400])
@pytest.mark.parametrize("sinks", [False, True])
def test_all_heads_in_a_tile_whose_keys_are_cut(window: int, sinks: bool, device: torch.device) -> None:
    """Three heads in a tile for four, of rows whose last block is not full."""
    case = make_case(
        [700, 300, 5, 70], [9, 5, 3, 1], q_heads=6, kv_heads=2, head_dim=32, window=window, sinks=sinks, device=device
    )
    words, out = case.keywords, poisoned(case)
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    config = PrefillConfig(4, 32, 4, 1, heads=4)
    cut = query_spans(starts, lens, query_ranges(starts, 0), config, shares=6, least_keys=128)
    assert len(cut.merges) > 1
    spans = Spans.copied(cut, device)
    prefill_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["query_start"], words["context_lens"],
        words["block_tables"], words["scale"], window, plan_prefills(spans.spans, spans.merges, config, 6, 32, 20),
        sinks=words["sinks"],
    )  # fmt: skip
    live = case.live()
    torch.testing.assert_close(out[live].double(), naive_attention(case)[live], atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize(("block_queries", "tile", "window"), [(32, 16, 0), (64, 16, 40), (16, 64, 5)])
def test_any_prefill_tiles_give_the_same(block_queries: int, tile: int, window: int, device: torch.device) -> None:
    """Chunks that begin inside a context, with blocks of queries smaller and larger than the tiles of keys."""
    case = make_case([150, 64, 70], [60, 64, 3], q_heads=2, kv_heads=2, head_dim=32, window=window, device=device)
    words, out = case.keywords, poisoned(case)
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    cut = query_spans(starts, lens, query_ranges(starts, 0), PrefillConfig(block_queries, tile, 4, 1))
    spans = Spans.copied(cut, device)
    prefill_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["query_start"], words["context_lens"],
        words["block_tables"], words["scale"], window, plan_prefills(spans.spans, spans.merges, cut.config, 2, 32, 1),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


def test_many_spans_take_several_launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of as many as a grid has room for; whole blocks, and pieces of others."""
    monkeypatch.setattr(prefill, "MOST_SPANS", 3)
    case = make_case([700, 40, 70], [9, 40, 33], q_heads=2, kv_heads=1, head_dim=32, device=device)
    words, out = case.keywords, poisoned(case)
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    cut = query_spans(starts, lens, query_ranges(starts, 0), PrefillConfig(16, 32, 4, 1), shares=6, least_keys=128)
    assert (len(cut.spans) > 6, len(cut.merges)) == (True, 1)
    spans = Spans.copied(cut, device)
    prefill_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["query_start"], words["context_lens"],
        words["block_tables"], words["scale"], 0, plan_prefills(spans.spans, spans.merges, cut.config, 2, 32, 20),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


def test_negative_block_is_harmless(device: torch.device) -> None:
    """A padding row of a graph may name no block: its result is finite or at least not a fault."""
    case = make_case([20, 1], [1, 1], q_heads=2, kv_heads=1, head_dim=32, device=device)
    case.keywords["block_tables"][case.keywords["slots"][1]] = -1
    case.k_cache[0], case.v_cache[0] = 0, 0
    result = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords)
    assert bool(result[1].isfinite().all())


@pytest.mark.parametrize("name", ["slots", "context_lens", "query_start"])
def test_numbers_of_rows_that_lie_apart_are_refused(name: str, device: torch.device) -> None:
    """Kernels read them one behind the other."""
    case = make_case([20, 40], [1, 1], q_heads=2, kv_heads=1, head_dim=32, device=device)
    words = case.keywords | {name: case.keywords[name].repeat_interleave(2)[::2]}
    with pytest.raises(AssertionError):
        paged_attention(case.q, case.k_cache, case.v_cache, **words)
    if name != "query_start":
        with pytest.raises(AssertionError):
            plan_decodes(words["slots"], words["context_lens"], 2, 1, 32, DecodeConfig(16, 3, 2, 2), 0)
