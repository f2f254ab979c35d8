"""Attention sinks at the shape of gpt-oss, on the GPU: every kernel that attends, keys that are cut, every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.kernels.attention import hopper_prefill
from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.paged_attention import (
    AttentionShape,
    cut_prompts,
    paged_attention,
    paged_attention_invariant,
)
from pagebus.kernels.common.target import target_of
from tests.gpu.kernels.cases import CUDA, relative_error
from tests.gpu.kernels.test_attention import check_attention, expected_attention
from tests.gpu.kernels.test_invariant_attention import computed
from tests.gpu.kernels.test_rotary_attention import LENS, run
from tests.kernels.attention.cases import AttentionCase, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]
BF16 = torch.bfloat16
WINDOW = 128
CACHES = [torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def gpt_oss(contexts: list[int], queries: list[int], **words: Any) -> AttentionCase:
    """With 64 heads of 64 over 8, unless ``words`` say otherwise."""
    shape = {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True, "device": CUDA}
    return make_case(contexts, queries, **shape | words)


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [
    (torch.float32, torch.float32), (torch.float16, torch.float16), *((BF16, cache) for cache in CACHES)
])  # fmt: skip
def test_attention(dtype: torch.dtype, cache_dtype: torch.dtype, window: int) -> None:
    """A mixed batch: short and long decodes, whole prompts, chunks deep inside a context, padding."""
    contexts = [1, 2, 1500, 577, 16, 65, 0, 300, 1200, 400, 33, 2000, 1]
    queries = [1, 1, 1, 1, 1, 1, 1, 300, 300, 17, 33, 64, 1]
    check_attention(gpt_oss(contexts, queries, window=window, padding=11, dtype=dtype, cache_dtype=cache_dtype))


@pytest.mark.parametrize("cache_dtype", CACHES)
def test_keys_that_are_cut(cache_dtype: torch.dtype) -> None:
    """Of decodes and of a prompt: a sink counts once for each row, not for each piece."""
    contexts, queries = [30_000, 3, 15_064, 33, 90], [1, 1, 64, 33, 5]
    case = gpt_oss(contexts, queries, kv_heads=2, q_heads=16, dtype=BF16, cache_dtype=cache_dtype)
    words = case.keywords
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    shape = AttentionShape(16, 2, 64, 2, float8=cache_dtype.itemsize == 1)
    assert len(cut_prompts(starts, lens, 2, shape, case.q.device).merges) > 0
    check_attention(case)


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_one_kernel_for_decodes(cache_dtype: torch.dtype, window: int) -> None:
    """Which norms, rotates and stores heads itself: what two kernels give, but for some last bits."""
    case = gpt_oss(LENS, [1] * len(LENS), window=window, dtype=BF16, cache_dtype=cache_dtype)
    qkv = torch.randn(len(LENS), 80, 64, device=CUDA).bfloat16()
    keywords = {"cos_sin": torch.rand(4000, 64, device=CUDA) * 2 - 1}
    without, (two, *caches), (one, *others) = (
        run(case, words, qkv, keywords, fused=fused)
        for words, fused in ((case.keywords | {"sinks": None}, True), (case.keywords, False), (case.keywords, True))
    )
    assert relative_error(one, two) < 4e-3
    assert relative_error(without[0], two) > 0.1
    assert all(torch.equal(mine, other) for mine, other in zip(caches, others, strict=True))


@pytest.mark.parametrize(
    ("context_lens", "query_lens"), [([1000], [300]), ([9001], [500]), ([700, 3001, 64, 5000], [650, 129, 64, 2000])]
)
@pytest.mark.parametrize(("head_dim", "window"), [(64, 0), (64, WINDOW), (128, 0)])
def test_long_prompts(context_lens: list[int], query_lens: list[int], head_dim: int, window: int) -> None:
    """The kernel for long prompts, whole blocks and cut ones: what the other gives."""
    case = gpt_oss(context_lens, query_lens, q_heads=32, head_dim=head_dim, window=window, dtype=BF16)
    if not hopper_prefill.supports(BF16, head_dim, target_of(case.q.device)):
        pytest.skip("no Hopper GPU")
    starts = [sum(query_lens[:row]) for row in range(len(query_lens))]
    rows = [LongRow(row, *of) for row, of in enumerate(zip(starts, query_lens, context_lens, strict=True))]
    words, out = case.keywords, torch.full_like(case.q, torch.nan)
    words = words | {"sinks": words["sinks"] + 9.0}  # a share beside thousands of keys
    hopper_prefill.hopper_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["block_tables"], words["scale"], rows,
        sliding_window=window, sinks=words["sinks"],
    )  # fmt: skip
    expected = paged_attention(case.q, case.k_cache, case.v_cache, **words)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    assert relative_error(paged_attention(case.q, case.k_cache, case.v_cache, **words | {"sinks": None}), out) > 0.1


@pytest.mark.parametrize("cache_dtype", CACHES)
def test_deterministic(cache_dtype: torch.dtype) -> None:
    """A token has the same bits in its prompt, in chunks, and decoded alone."""
    counts, contexts = [1, 1, 900, 300, 17], [1500, 33, 900, 1200, 400]
    case = gpt_oss(contexts, counts, window=WINDOW, dtype=BF16, cache_dtype=cache_dtype)
    together = paged_attention_invariant(case.q, case.k_cache, case.v_cache, **case.keywords)
    assert relative_error(together, expected_attention(case, case.keywords)) < 8e-3
    every = torch.arange(sum(counts), device=CUDA)
    row_of = torch.arange(len(counts), device=CUDA).repeat_interleave(torch.tensor(counts, device=CUDA))
    assert torch.equal(computed(case, every, row_of, [1] * len(every)), together)
    cut = [min(37, count - begin) for count in counts for begin in range(0, count, 37)]
    first = torch.tensor(cut, device=CUDA).cumsum(0) - 1
    assert torch.equal(computed(case, every, row_of[first], cut), together)
