"""Copying pages out of the cache, and merging attention over two sets of keys."""

from __future__ import annotations

import math

import pytest
import torch

from pagebus.kernels.attention.gather import (
    gather_tokens,
    gather_tokens_reference,
    merge_attention,
    merge_attention_reference,
)
from tests.kernels.attention.cases import make_case


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(("first", "count"), [(0, 90), (16, 50), (5, 17), (39, 1), (3, 0)])
def test_gathered_tokens_are_those_of_the_pages(row: int, first: int, count: int, device: torch.device) -> None:
    """Any range of a sequence's positions, copied in order."""
    case = make_case([90, 95], [1, 1], q_heads=6, kv_heads=3, head_dim=32, device=device)
    slot, tables = case.keywords["slots"][row : row + 1], case.keywords["block_tables"]
    results = [torch.full((2, count, 3, 32), torch.nan, device=device) for _ in range(2)]
    for gather, (k, v) in zip((gather_tokens, gather_tokens_reference), results, strict=True):
        gather(case.k_cache, case.v_cache, slot, first, k, v, tables)
    assert torch.equal(results[0], results[1])
    block = int(tables[slot[0], first // 16])
    if count:
        assert torch.equal(results[0][0, 0], case.k_cache[block, first % 16])
        assert torch.equal(results[0][1, 0], case.v_cache[block, first % 16])


def test_several_sequences_are_gathered_at_once(device: torch.device) -> None:
    """As many tokens of each, one sequence behind the other."""
    case = make_case([90, 95, 60], [1, 1, 1], q_heads=6, kv_heads=3, head_dim=32, device=device)
    slots, tables = case.keywords["slots"], case.keywords["block_tables"]
    for gather in (gather_tokens, gather_tokens_reference):
        k, v = torch.full((2, 3 * 50, 3, 32), torch.nan, device=device)
        gather(case.k_cache, case.v_cache, slots, 5, k, v, tables)
        for row in range(3):
            alone_k, alone_v = torch.empty((2, 50, 3, 32), device=device)
            gather_tokens(case.k_cache, case.v_cache, slots[row : row + 1], 5, alone_k, alone_v, tables)
            assert torch.equal(k[row * 50 :][:50], alone_k)
            assert torch.equal(v[row * 50 :][:50], alone_v)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_pages_are_widened(dtype: torch.dtype, device: torch.device) -> None:
    """What a float8 cache holds comes out multiplied with its head's scale."""
    case = make_case([90, 95], [1, 1], q_heads=6, kv_heads=3, head_dim=32, cache_dtype=dtype, device=device)
    slot, tables, scales = (case.keywords[name] for name in ("slots", "block_tables", "kv_scales"))
    for target in (torch.float32, torch.float16):
        results = [torch.full((2, 50, 3, 32), torch.nan, device=device, dtype=target) for _ in range(2)]
        for gather, (k, v) in zip((gather_tokens, gather_tokens_reference), results, strict=True):
            gather(case.k_cache, case.v_cache, slot[:1], 37, k, v, tables, scales)
        assert torch.equal(results[0], results[1])
        block = int(tables[slot[0], 37 // 16])
        for part, cache in enumerate((case.k_cache, case.v_cache)):
            assert torch.equal(results[0][part, 0], (cache[block, 5].float() * scales[part].unsqueeze(1)).to(target))


@pytest.mark.parametrize("head_dim", [32, 80])
def test_int8_pages_are_widened(head_dim: int, device: torch.device) -> None:
    """What a cache in int8 holds comes out multiplied with its token's scale."""
    shape = {"q_heads": 6, "kv_heads": 3, "head_dim": head_dim, "block_size": 32, "cache_dtype": torch.int8}
    case = make_case([90, 95, 60], [1, 1, 1], **shape, device=device)
    slots, tables, scales = (case.keywords[name] for name in ("slots", "block_tables", "kv_scales"))
    for target in (torch.float32, torch.float16):
        results = [torch.full((2, 3 * 50, 3, head_dim), torch.nan, device=device, dtype=target) for _ in range(2)]
        for gather, (k, v) in zip((gather_tokens, gather_tokens_reference), results, strict=True):
            gather(case.k_cache, case.v_cache, slots, 7, k, v, tables, scales)
        assert torch.equal(results[0], results[1])
        block = int(tables[slots[1], 7 // 32])
        for part, cache in enumerate((case.k_cache, case.v_cache)):
            numbers = cache[block, 7].float() if part == 0 else (cache[block, 7].view(torch.uint8).float() - 128)
            expected = numbers * scales[part, block, 7].float().unsqueeze(1)
            assert torch.equal(results[0][part, 50], expected.to(target))


@pytest.mark.parametrize("merge", [merge_attention, merge_attention_reference])
def test_merging_is_attention_over_both(merge, device: torch.device) -> None:
    """Attention over keys in two parts, merged by their log-sum-exp, is attention over all keys."""
    tokens, heads, dim, cut = 5, 3, 24, 11
    q, k, v = (torch.randn(size, heads, dim, device=device) for size in (tokens, 40, 40))

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.einsum("thd,khd->thk", q, k[keys]) * 3
        return torch.einsum("thk,khd->thd", scores.softmax(2), v[keys]), scores.logsumexp(2)

    (out, lse), (other, other_lse), expected = attend(slice(cut)), attend(slice(cut, None)), attend(slice(None))
    result, total = merge(out, lse, other, other_lse)
    torch.testing.assert_close(result, expected[0])
    torch.testing.assert_close(total, expected[1])


@pytest.mark.parametrize("merge", [merge_attention, merge_attention_reference])
def test_an_empty_part_does_not_count(merge, device: torch.device) -> None:
    """Where a log-sum-exp is minus infinity the values may be anything."""
    out, other = torch.randn(2, 4, 2, 16, device=device)[:, :].unbind(0)
    lse, other_lse = torch.randn(2, 4, 2, device=device).unbind(0)
    lse, other_lse = lse.clone(), other_lse.clone()
    lse[0], other_lse[1] = -math.inf, -math.inf
    out, other = out.clone(), other.clone()
    out[0], other[1] = math.nan, math.nan
    result, _total = merge(out, lse, other, other_lse, torch.full_like(out, math.nan))
    torch.testing.assert_close(result[0], other[0])
    torch.testing.assert_close(result[1], out[1])
    assert bool(result.isfinite().all())
