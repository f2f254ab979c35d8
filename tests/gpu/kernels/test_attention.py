"""Attention over pages at the shapes of real models, on the GPU, against its reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.kernels.attention import hopper_prefill
from pagebus.kernels.attention.cudnn_prefill import PIECES, LongRow, cudnn_attention, filled_parts, scratch_bytes
from pagebus.kernels.attention.forms.launch import decode_config
from pagebus.kernels.attention.gather import gather_tokens
from pagebus.kernels.attention.paged_attention import (
    AttentionShape,
    Spans,
    cut_prompts,
    paged_attention,
    paged_attention_reference,
    plan_attention,
)
from pagebus.kernels.attention.prefill_plan import fixed_config, num_shares, query_ranges, query_spans
from pagebus.kernels.common.int8 import block_bytes, split_blocks, to_int8_reference
from pagebus.kernels.common.target import num_multiprocessors, target_of
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write
from tests.gpu.kernels.cases import CUDA, SHAPES, relative_error
from tests.kernels.attention.cases import AttentionCase, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]


def expected_attention(case: AttentionCase, keywords: dict[str, Any]) -> torch.Tensor:
    """In float32; a cache of one byte is left to the reference, which knows its scales."""
    caches = case.k_cache, case.v_cache
    if keywords["kv_scales"] is None:
        caches = case.k_cache.float(), case.v_cache.float()
    return paged_attention_reference(case.q.float(), *caches, **keywords)


def check_attention(case: AttentionCase) -> None:
    """Compare on poisoned output, as a whole and row of heads by row of heads."""
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device=CUDA)
    live = case.live()
    result = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, out=out)[live]
    expected = expected_attention(case, case.keywords)[live]
    limit = 2e-6 if case.q.dtype == torch.float32 else 8e-3
    assert relative_error(result, expected) < limit
    worst = (result.float() - expected).norm(dim=2) / (expected.norm(dim=2) + 1e-2)
    assert float(worst.max()) < 10 * limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape: str, dtype: torch.dtype) -> None:
    """A mixed batch: short and long decodes, whole prompts, chunks deep inside a context, padding."""
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    contexts = [1, 2, 1500, 577, 16, 65, 0, 900, 1200, 400, 33, 2000, 1]
    queries = [1, 1, 1, 1, 1, 1, 1, 900, 300, 17, 33, 64, 1]
    if dtype == torch.float32:
        contexts[7], queries[7] = 300, 300
    case = make_case(
        contexts, queries, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window, padding=11,
        dtype=dtype, device=CUDA,
    )  # fmt: skip
    check_attention(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("shape", ["llama8b", "qwen06b", "mistral", "smollm", "phi", "gemma"])
def test_attention_over_one_byte(shape: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A mixed batch over a cache of one byte per element, whose scales differ from head to head, or from token to
    token."""
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    contexts, queries = [1, 2, 1500, 577, 16, 65, 0, 300, 1200, 400, 1], [1, 1, 1, 1, 1, 1, 1, 300, 200, 17, 1]
    check_attention(
        make_case(
            contexts, queries, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window, padding=11,
            dtype=dtype, cache_dtype=cache_dtype, device=CUDA,
        )
    )  # fmt: skip


LONG_ROWS = [(64, 15_064), (128, 32_768), (512, 32_768), (64, 131_072), (512, 131_072)]
"""New tokens and the context they end."""


@pytest.mark.parametrize(("shape", "row"), [
    *(("llama8b", row) for row in LONG_ROWS),
    *((shape, LONG_ROWS[0]) for shape in ("qwen06b", "qwen7b", "mistral", "smollm", "phi", "gemma", "multiquery")),
    ("qwen06b", LONG_ROWS[3]),
])  # fmt: skip
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_few_queries_behind_a_long_context(shape: str, row: tuple[int, int], cache_dtype: torch.dtype) -> None:
    """Keys are cut into pieces and merged, beside decodes and small prompts; the same bits every time."""
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    case = make_case(
        [700, 3, row[1], 33, 90], [1, 1, row[0], 33, 5], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
        window=window, dtype=torch.bfloat16, cache_dtype=cache_dtype, device=CUDA,
    )  # fmt: skip
    starts, lens = case.keywords["query_start"].cpu().numpy(), case.keywords["context_lens"].cpu().numpy()
    size = AttentionShape(q_heads, kv_heads, head_dim, 2, float8=cache_dtype.itemsize == 1)
    cut = cut_prompts(starts, lens, 2, size, case.q.device)
    assert (len(cut.merges) > 0) == (row[0] < 512 or q_heads < 32)
    check_attention(case)
    again = [paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords) for _ in range(20)]
    assert all(torch.equal(result, again[0]) for result in again)


@pytest.mark.parametrize("shape", ["llama8b", "qwen06b", "mistral", "gemma"])
def test_prompts_in_a_graph(shape: str) -> None:
    """Captured without any row, a pass serves prompts whose keys are cut, and others; what is left over is harmless."""
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    case = make_case(
        [700, 3, 15_064, 33, 9000], [1, 1, 64, 33, 65], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
        window=window, dtype=torch.bfloat16, device=CUDA,
    )  # fmt: skip
    words, rows = case.keywords, len(case.context_lens)
    expected = expected_attention(case, words)
    size = AttentionShape(q_heads, kv_heads, head_dim, 2, frozenset({window}))
    config = fixed_config(head_dim, 2)
    spans, merges = torch.full((64, 5), -1, dtype=torch.int32), torch.zeros((40, 4), dtype=torch.int32)
    device_spans = Spans(config, spans.to(CUDA), merges.to(CUDA))
    decode_lens = torch.where(torch.arange(rows, device=CUDA) < 2, words["context_lens"], 0)
    fixed = words | {"num_decodes": rows, "decode_lens": decode_lens}
    out = torch.empty_like(case.q)

    def attend() -> None:
        plan = plan_attention(words["slots"], decode_lens, size, device_spans)
        for _layer in range(3):
            out.fill_(torch.nan)
            paged_attention(case.q, case.k_cache, case.v_cache, **fixed, out=out, plan=plan)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    starts, lens = words["query_start"].cpu().numpy(), words["context_lens"].cpu().numpy()
    shares = num_shares(config, q_heads, num_multiprocessors(case.q.device))
    for most in (shares, 0, 4, shares):
        cut = query_spans(starts, lens, query_ranges(starts, 2), config, most)
        assert (len(cut.merges) > 0) == (most > 0)
        for filled, given, target in (
            (spans.clone(), cut.spans, device_spans.spans), (merges.clone(), cut.merges, device_spans.merges)
        ):  # fmt: skip
            filled[: len(given)] = torch.from_numpy(given)
            target.copy_(filled)
        graph.replay()
        assert relative_error(out, expected) < 8e-3


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_long_prefill(head_dim: int) -> None:
    """A large chunk late in a long context, which has its own launch shape."""
    check_attention(
        make_case(
            [50, 9000, 3000],
            [1, 1100, 1500],
            q_heads=8,
            kv_heads=2,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device=CUDA,
        )
    )


@pytest.mark.parametrize("lens", [[2048] * 4, [2048, 1700, 2048, 1990], [4096, 4000], [2048, 6100]])
def test_library_prefill_of_several(lens: list[int]) -> None:
    """Prompts as a batch, and with parts that fill no piece, each as our kernel computes it alone."""
    q_heads, kv_heads, head_dim, _window = SHAPES["llama8b"]
    case = make_case(
        lens, lens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, device=CUDA
    )
    starts = [sum(lens[:row]) for row in range(len(lens))]
    rows = tuple(LongRow(row, start, count, count) for row, (start, count) in enumerate(zip(starts, lens, strict=True)))
    long_rows = filled_parts(rows, PIECES[0])
    result = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, long_rows=long_rows)
    own = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords)
    torch.testing.assert_close(result, own, atol=1e-2, rtol=1e-2)
    out = torch.full_like(case.q, torch.nan)
    assert torch.equal(
        paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, long_rows=long_rows, out=out), result
    )


@pytest.mark.parametrize("shape", ["llama8b", "qwen06b", "smollm"])
@pytest.mark.parametrize(("context", "queries"), [(8192, 8192), (5001, 5001), (45000, 3000), (13200, 8192)])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_library_prefill(shape: str, context: int, queries: int, cache_dtype: torch.dtype) -> None:
    """Long prompts and chunks of them through cuDNN, and what fills no piece through our kernel, against some of their
    queries computed plainly."""
    q_heads, kv_heads, head_dim, _window = SHAPES[shape]
    case = make_case(
        [context], [queries], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16,
        cache_dtype=cache_dtype, device=CUDA,
    )  # fmt: skip
    long_rows = filled_parts((LongRow(0, 0, queries, context),), PIECES[0])
    words = case.keywords | {"long_rows": long_rows}
    out = torch.full(case.q.shape, torch.nan, dtype=torch.bfloat16, device=CUDA)
    result = paged_attention(case.q, case.k_cache, case.v_cache, **words, out=out)
    assert torch.equal(paged_attention(case.q, case.k_cache, case.v_cache, **words), result)
    beside = paged_attention(case.q, case.k_cache, case.v_cache, **words, projected=case.projected())
    torch.testing.assert_close(beside, result, atol=1e-2, rtol=1e-2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cudnn_attention(
        case.q, case.k_cache, case.v_cache, torch.empty_like(out), words["slots"], words["block_tables"],
        words["scale"], long_rows, words["kv_scales"],
    )  # fmt: skip
    taken = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert taken <= scratch_bytes(queries, context - queries, q_heads, kv_heads, head_dim, 2) + 2**20
    chosen = torch.randperm(queries, device=CUDA)[:99]
    chosen[0] = queries - 1
    lens = (context - queries + 1 + chosen).int()
    plainly = case.keywords | {
        "slots": words["slots"].expand(len(chosen)).contiguous(), "context_lens": lens,
        "query_start": torch.arange(len(chosen) + 1, dtype=torch.int32, device=CUDA), "num_decodes": len(chosen),
    }  # fmt: skip
    caches = [cache if cache_dtype == torch.int8 else cache.float() for cache in (case.k_cache, case.v_cache)]
    expected = paged_attention_reference(case.q[chosen].float(), *caches, **plainly)
    assert relative_error(result[chosen], expected) < 8e-3


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rows", [1, 3, 8, 32, 100, 256])
def test_decode_batches(rows: int, cache_dtype: torch.dtype) -> None:
    """Decode batches of every number of splits, with very different lengths."""
    contexts = [1 + (row * 7919) % 1600 for row in range(rows)]
    contexts[0] = 4000 if rows < 64 else 1
    check_attention(
        make_case(
            contexts, [1] * rows, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, cache_dtype=cache_dtype,
            device=CUDA,
        )
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_decodes_are_deterministic(rows: int) -> None:
    """Split contexts give the same bits every time."""
    case = make_case(
        [3000 - 61 * row for row in range(rows)], [1] * rows, q_heads=32, kv_heads=8, head_dim=128,
        dtype=torch.bfloat16, device=CUDA,
    )  # fmt: skip
    first = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords)
    differences = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(200):
        out = torch.full_like(first, torch.nan)
        differences += (paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, out=out) != first).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_other_block_sizes(block_size: int, cache_dtype: torch.dtype) -> None:
    """Blocks larger than a tile, and no power of two."""
    check_attention(
        make_case(
            [700, 100, 500, 129],
            [1, 1, 400, 129],
            q_heads=8,
            kv_heads=2,
            head_dim=128,
            block_size=block_size,
            dtype=torch.bfloat16,
            cache_dtype=cache_dtype,
            device=CUDA,
        )
    )


def test_offsets_beyond_int32() -> None:
    """Blocks whose elements lie more than 2**31 into the cache are written and read."""
    layers, kv_heads, head_dim, block_size = 32, 8, 128, 16
    per_block = layers * 2 * block_size * kv_heads * head_dim
    num_blocks = 2**31 // per_block + 40
    cache = torch.zeros((num_blocks, layers, 2, block_size, kv_heads, head_dim), dtype=torch.bfloat16, device=CUDA)
    k_cache, v_cache = cache[:, -1, 0], cache[:, -1, 1]
    length, first = 300, num_blocks - 20
    qkv = torch.randn(length, 3 * kv_heads, head_dim, device=CUDA).bfloat16()
    places, positions = first * block_size + torch.arange(length, device=CUDA), torch.zeros(length, device=CUDA).long()
    unturned = torch.ones(1, head_dim, device=CUDA)
    unturned[:, head_dim // 2 :] = 0
    rotary_kv_write(qkv, positions, unturned, k_cache, v_cache, places)
    _q, k, v = qkv.chunk(3, dim=1)
    assert torch.equal(k_cache[first : first + 19].flatten(0, 1)[:length], k)
    assert torch.equal(v_cache[first : first + 19].flatten(0, 1)[:length], v)
    table = torch.arange(first, first + 19, dtype=torch.int32, device=CUDA).unsqueeze(0)
    for queries in (1, 100):
        q = torch.randn(queries, 32, head_dim, device=CUDA).bfloat16()
        keywords = {
            "slots": torch.zeros(1, dtype=torch.int32, device=CUDA),
            "query_start": torch.tensor([0, queries], dtype=torch.int32, device=CUDA),
            "context_lens": torch.tensor([length], dtype=torch.int32, device=CUDA),
            "scale": head_dim**-0.5, "num_decodes": int(queries == 1),
        }  # fmt: skip
        result = paged_attention(q, k_cache, v_cache, block_tables=table, **keywords)
        expected = paged_attention_reference(
            q.float(), k_cache[first:].float(), v_cache[first:].float(), block_tables=table - first, **keywords
        )
        assert relative_error(result, expected) < 8e-3


def test_scales_beyond_int32() -> None:
    """A block in int8 whose bytes lie more than 2**32 into the cache is written and read, with its scales."""
    layers, kv_heads, head_dim, block_size = 32, 8, 128, 16
    size = block_bytes(layers, block_size, kv_heads, head_dim)
    blocks = torch.zeros((2**32 // size + 40, size), dtype=torch.int8, device=CUDA)
    numbers, scales = split_blocks(blocks, layers, kv_heads, head_dim)
    k_cache, v_cache, last = numbers[:, -1, 0], numbers[:, -1, 1], scales[-1]
    length, first = 300, len(blocks) - 20
    qkv = torch.randn(length, 3 * kv_heads, head_dim, device=CUDA).bfloat16()
    places, positions = first * block_size + torch.arange(length, device=CUDA), torch.zeros(length, device=CUDA).long()
    unturned = torch.ones(1, head_dim, device=CUDA)
    unturned[:, head_dim // 2 :] = 0
    rotary_kv_write(qkv, positions, unturned, k_cache, v_cache, places, kv_scales=last)
    for part, heads in enumerate(qkv.chunk(3, dim=1)[1:]):
        wanted, wanted_scales = to_int8_reference(heads, part)
        assert torch.equal((k_cache, v_cache)[part][first : first + 19].flatten(0, 1)[:length], wanted)
        assert torch.equal(last[part, first : first + 19].flatten(0, 1)[:length], wanted_scales)
    assert int(blocks[:first].count_nonzero()) == 0
    table = torch.arange(first, first + 19, dtype=torch.int32, device=CUDA).unsqueeze(0)
    for queries in (1, 100):
        q = torch.randn(queries, 32, head_dim, device=CUDA).bfloat16()
        keywords = {
            "slots": torch.zeros(1, dtype=torch.int32, device=CUDA), "block_tables": table, "kv_scales": last,
            "query_start": torch.tensor([0, queries], dtype=torch.int32, device=CUDA),
            "context_lens": torch.tensor([length], dtype=torch.int32, device=CUDA),
            "scale": head_dim**-0.5, "num_decodes": int(queries == 1),
        }  # fmt: skip
        result = paged_attention(q, k_cache, v_cache, **keywords)
        assert relative_error(result, paged_attention_reference(q.float(), k_cache, v_cache, **keywords)) < 8e-3


def test_grid_depends_on_the_device_alone() -> None:
    """As many decode programs as the device holds at once."""
    assert decode_config(8, 128, 2, 132).programs == 66
    assert decode_config(1, 128, 2, 132).programs == 528


@pytest.mark.parametrize("heads", [(32, 8), (8, 1)])
@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [([1], [1]), ([77], [77]), ([129], [1]), ([1000], [300]), ([5003], [2500]), ([9001], [500]), ([40000], [1000]),
     ([128, 256, 384], [128, 128, 384]), ([700, 3001, 64, 5000], [650, 129, 64, 2000]), ([40000, 30000], [200, 300])],
)  # fmt: skip
def test_long_attention(heads: tuple[int, int], context_lens: list[int], query_lens: list[int]) -> None:
    """Rows of any length, alone and together, whole blocks and cut ones; what no row asked for stays."""
    case = make_case(
        context_lens, query_lens, q_heads=heads[0], kv_heads=heads[1], head_dim=128, dtype=torch.bfloat16, device=CUDA
    )
    assert hopper_prefill.supports(case.q.dtype, case.q.shape[2], target_of(case.q.device))
    starts = [sum(query_lens[:row]) for row in range(len(query_lens))]
    rows = [LongRow(row, *of) for row, of in enumerate(zip(starts, query_lens, context_lens, strict=True))]
    words, out = case.keywords, torch.full_like(case.q, torch.nan)
    hopper_prefill.hopper_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["block_tables"], words["scale"], rows
    )
    expected = paged_attention(case.q, case.k_cache, case.v_cache, **words)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    marked = torch.full_like(case.q, 7.0)
    hopper_prefill.hopper_attention(
        case.q, case.k_cache, case.v_cache, marked, words["slots"], words["block_tables"], words["scale"], rows[-1:]
    )
    assert (marked[: starts[-1]] == 7.0).all()
    torch.testing.assert_close(marked[starts[-1] :], expected[starts[-1] :], atol=1e-2, rtol=1e-2)


def test_long_attention_where_keys_were_projected() -> None:
    """Prompts of whole tiles behind tokens of others: their keys beside the queries, and copied out of the pages."""
    lens = [50, 256, 2048, 384]
    case = make_case(lens, lens, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=CUDA)
    rows = [LongRow(row, sum(lens[:row]), lens[row], lens[row]) for row in range(1, 4)]
    words = case.keywords
    pages = case.k_cache, case.v_cache, words["slots"], words["block_tables"]
    fused = torch.full((sum(lens) + 9, 48, 128), torch.nan, dtype=torch.bfloat16, device=CUDA)
    fused[: sum(lens), :32] = case.q
    for row in rows:
        k, v = torch.empty(2, row.num_queries, 8, 128, dtype=torch.bfloat16, device=CUDA)
        gather_tokens(case.k_cache, case.v_cache, words["slots"][row.row :][:1], 0, k, v, words["block_tables"])
        fused[row.tokens, 32:40], fused[row.tokens, 40:] = k, v
    results = []
    for projected in (None, (fused[:, 32:40], fused[:, 40:])):
        out = torch.full((len(fused), 32, 128), torch.nan, dtype=torch.bfloat16, device=CUDA)
        hopper_prefill.hopper_attention(
            fused[:, :32], *pages[:2], out, *pages[2:], words["scale"], rows, projected=projected
        )
        results.append(out[rows[0].tokens.start : sum(lens)])
    assert not results[0].isnan().any()
    assert torch.equal(*results)
