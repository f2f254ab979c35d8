"""Paged attention: the reference against the definition, the kernels against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.attention_decode import DecodeConfig, decode_attention
from kernels.attention_prefill import PrefillConfig, prefill_attention
from kernels.paged_attention import paged_attention, paged_attention_reference
from tests.kernels.attention_cases import AttentionCase, make_case, naive_attention

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = {"context_lens": [17, 1, 150, 64, 40, 90, 33], "query_lens": [1, 1, 1, 1, 40, 13, 2]}

CASES: dict[str, dict[str, Any]] = {
    "mixed": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64},
    "window": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "window": 20},
    "window_longer_than_context": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "window": 1000},
    "window_of_one": {**MIXED, "q_heads": 2, "kv_heads": 2, "head_dim": 32, "window": 1},
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


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_the_reference(name: str, device: torch.device) -> None:
    """Both kernels together write every token and agree with the reference."""
    case = make_case(**CASES[name], device=device)
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, **case.keywords)
    result = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, out=poisoned(case))
    torch.testing.assert_close(result, expected, atol=TOLERANCE[case.q.dtype], rtol=1e-3)


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


@pytest.mark.parametrize("splits", [1, 2, 5, 32])
@pytest.mark.parametrize("tile", [16, 64])
def test_any_split_gives_the_same(splits: int, tile: int, device: torch.device) -> None:
    """However a context is cut, also into more parts than it has tiles, the merged result is the same."""
    case = make_case([1, 300, 64, 0, 129], [1] * 5, q_heads=6, kv_heads=2, head_dim=32, window=250, device=device)
    words, out = case.keywords, poisoned(case)
    decode_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["context_lens"], words["block_tables"], 5,
        words["scale"], 250, DecodeConfig(tile=tile, splits=splits, num_warps=2, num_stages=2),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize(("block_queries", "tile", "window"), [(16, 32, 0), (32, 16, 0), (64, 16, 40), (16, 64, 5)])
def test_any_prefill_tiles_give_the_same(block_queries: int, tile: int, window: int, device: torch.device) -> None:
    """Chunks that begin inside a context, with blocks of queries smaller and larger than the tiles of keys."""
    case = make_case([150, 64, 70], [60, 64, 3], q_heads=2, kv_heads=2, head_dim=32, window=window, device=device)
    words, out = case.keywords, poisoned(case)
    prefill_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["query_start"], words["context_lens"],
        words["block_tables"], 0, 64, 150, words["scale"], window, PrefillConfig(block_queries, tile, 4, 1),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), naive_attention(case), atol=3e-6, rtol=1e-4)


def test_negative_block_is_harmless(device: torch.device) -> None:
    """A padding row of a graph may name no block: its result is finite or at least not a fault."""
    case = make_case([20, 1], [1, 1], q_heads=2, kv_heads=1, head_dim=32, device=device)
    case.keywords["block_tables"][case.keywords["slots"][1]] = -1
    case.k_cache[0], case.v_cache[0] = 0, 0
    result = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords)
    assert bool(result[1].isfinite().all())
