"""Attention of decodes that norms, rotates and caches the newest token itself, at the shapes of real models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pagebus.kernels.attention.paged_attention import AttentionShape, paged_attention, plan_attention
from pagebus.kernels.attention.rotary_attention import rotary_attention
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write
from tests.gpu.kernels.cases import CUDA, SHAPES, relative_error
from tests.kernels.attention.cases import AttentionCase, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]

LENS = [1, 2, 1500, 577, 16, 65, 0, 128, 900, 4000, 0, 33] + [40 + 7 * row for row in range(50)]


def run(case: AttentionCase, words: dict[str, Any], qkv: torch.Tensor, norms: dict[str, Any], *, fused: bool) -> Any:
    """One layer by one kernel or by two, into a copy of the cache that is poisoned where new tokens go: the result,
    and both caches as bytes, and in int8 their scales."""
    slots, lens, tables = words["slots"], words["context_lens"], words["block_tables"]
    k_cache, v_cache, kv_scales = copy.deepcopy((case.k_cache, case.v_cache, words["kv_scales"]))
    int8 = k_cache.dtype == torch.int8
    last = (lens - 1).clamp_(min=0).long()
    block_size = k_cache.shape[1]
    places = tables[slots.long(), last // block_size].long() * block_size + last % block_size
    mapping = torch.where(lens > 0, places, -1)
    for cache in kv_scales if int8 else (k_cache, v_cache):
        where = mapping[mapping >= 0]
        cache[where // block_size, where % block_size] = torch.nan
    names = "slots", "context_lens", "block_tables", "scale", "sliding_window", "sinks"
    shared = {name: words[name] for name in names}
    shared |= {"kv_scales": kv_scales}
    cos_sin = norms["cos_sin"]
    rest = {name: value for name, value in norms.items() if name != "cos_sin"}
    shape = AttentionShape(
        case.q.shape[1], k_cache.shape[2], k_cache.shape[3], qkv.element_size(), frozenset({words["sliding_window"]}),
        float8=words["kv_scales"] is not None,
    )  # fmt: skip
    plan = plan_attention(slots, lens, shape, settled=False)
    qkv = qkv.clone()
    if fused:
        out = rotary_attention(qkv, cos_sin, k_cache, v_cache, **shared, plan=plan, **rest)
    else:
        q = rotary_kv_write(
            qkv, last.int(), cos_sin, k_cache, v_cache, mapping, kv_scales=kv_scales, **rest
        )  # fmt: skip
        out = paged_attention(
            q, k_cache, v_cache, **shared, query_start=words["query_start"], num_decodes=len(slots),
            plan=plan,
        )  # fmt: skip
    written = (k_cache, v_cache, kv_scales) if int8 else (k_cache, v_cache)
    return out[lens > 0], *(part.contiguous().view(torch.uint8) for part in written)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    "shape",
    ["llama8b", "qwen06b", "mistral", "smollm", "qwen7b", "gemma", "llama70b", "gptoss", "qwen235b", "phi", "head80"],
)
def test_as_two_kernels_in_turn(shape: str, cache: torch.dtype, norms: bool) -> None:
    """The same keys and values, and results but for some last bits; the same bits every time."""
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    case = make_case(
        LENS, [1] * len(LENS), q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
        dtype=torch.bfloat16, cache_dtype=cache, device=CUDA,
    )  # fmt: skip
    qkv = torch.randn(len(LENS), q_heads + 2 * kv_heads, head_dim, device=CUDA).bfloat16()
    keywords: dict[str, Any] = {"cos_sin": torch.rand(4000, head_dim, device=CUDA) * 2 - 1}
    if norms:
        weights = torch.randn(2, head_dim, device=CUDA).bfloat16()
        keywords |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    expected = run(case, case.keywords, qkv, keywords, fused=False)
    results = [run(case, case.keywords, qkv, keywords, fused=True) for _ in range(20)]
    for result in results:
        assert all(torch.equal(mine, first) for mine, first in zip(result, results[0], strict=True))
    (out, *caches), (wanted, *wanted_caches) = results[0], expected
    assert relative_error(out, wanted) < 4e-3
    assert norms or int((out != wanted).sum()) <= out.numel() * 2e-3  # products are summed up in another order
    for mine, other in zip(caches, wanted_caches, strict=True):
        assert int((mine != other).sum()) <= (mine.numel() * 1e-3 if norms else 0)
