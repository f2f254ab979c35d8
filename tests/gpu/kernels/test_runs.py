"""Attention of decodes with drafts at the shapes of real models, on the GPU, against its reference in float32."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.attention.paged_attention import AttentionShape, paged_attention, plan_attention
from tests.gpu.kernels.cases import CUDA, SHAPES, relative_error
from tests.gpu.kernels.test_attention import expected_attention
from tests.kernels.attention.cases import make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]
MOST = 5


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 13, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_runs(shape: str, rows: int, cache_dtype: torch.dtype) -> None:
    """Short rows and long ones, with drafts and without, and rows of nothing behind them."""
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    if q_heads // kv_heads * MOST > 64 or head_dim * q_heads // kv_heads * MOST > 64 * 128:
        pytest.skip("too many heads")
    contexts = [(row * 997 + 576) % 2500 + MOST for row in range(rows)]
    queries = [MOST - row % MOST for row in range(rows)]
    case = make_case(
        contexts, queries, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window, padding=3,
        dtype=torch.bfloat16, cache_dtype=cache_dtype, device=CUDA,
    )  # fmt: skip
    words, pad = case.keywords, torch.nn.functional.pad
    expected = expected_attention(case, words)[case.live()]
    words |= {
        "slots": pad(words["slots"], (0, 3)),
        "query_start": pad(words["query_start"], (0, 3), value=sum(queries)),
        "context_lens": pad(words["context_lens"], (0, 3)),
        "num_decodes": 0,
    }
    attention = AttentionShape(
        q_heads, kv_heads, head_dim, 2, frozenset({window}), float8=words["kv_scales"] is not None, run=MOST
    )
    plan = plan_attention(
        words["slots"], words["context_lens"], attention, query_start=words["query_start"], settled=False
    )
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device=CUDA)
    result = paged_attention(case.q, case.k_cache, case.v_cache, **words, plan=plan, out=out)[case.live()]
    assert relative_error(result, expected) < 8e-3
    worst = (result.float() - expected).norm(dim=2) / (expected.norm(dim=2) + 1e-2)
    assert float(worst.max()) < 8e-2
