"""Attention with ``--deterministic``, at the shapes of real models: a token's bits, however it is computed."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.attention.paged_attention import paged_attention_invariant
from tests.gpu.kernels.cases import CUDA, SHAPES, relative_error
from tests.gpu.kernels.test_attention import expected_attention
from tests.kernels.attention.cases import AttentionCase, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]


def computed(case: AttentionCase, tokens: torch.Tensor, row_of: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Attention of ``tokens`` of the case, of the rows ``row_of`` [R], in rows of so many tokens each."""
    words = case.keywords
    ends = torch.tensor(counts, device=CUDA).cumsum(0)
    begins = words["query_start"][row_of]
    lens = words["context_lens"][row_of] - (words["query_start"][row_of + 1] - begins)
    lens += (tokens[ends - 1] - begins + 1).int()
    rows = {
        "slots": words["slots"][row_of].contiguous(), "context_lens": lens,
        "query_start": torch.nn.functional.pad(ends, (1, 0)).int(),
    }  # fmt: skip
    return paged_attention_invariant(case.q[tokens], case.k_cache, case.v_cache, **words | rows)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn), (torch.bfloat16, torch.int8),
    (torch.float32, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_however_it_is_computed(
    shape: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Whole prompts and chunks beside decodes are right; each of their tokens decoded alone, all of them decoded
    together, and rows cut anywhere give the same."""
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    counts = [1, 1, 900, 300, 17, 64, 1] if dtype != torch.float32 else [1, 1, 200, 100, 17, 64, 1]
    contexts = [1500, 33, counts[2], 1200, 400, 2000, 1]
    case = make_case(
        contexts, counts, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window, dtype=dtype,
        cache_dtype=cache_dtype, device=CUDA,
    )  # fmt: skip
    out = torch.full_like(case.q, torch.nan)
    together = paged_attention_invariant(case.q, case.k_cache, case.v_cache, **case.keywords, out=out)
    limit = 2e-6 if dtype == torch.float32 else 8e-3
    assert relative_error(together, expected_attention(case, case.keywords)) < limit

    every = torch.arange(sum(counts), device=CUDA)
    row_of = torch.arange(len(counts), device=CUDA).repeat_interleave(torch.tensor(counts, device=CUDA))
    assert torch.equal(computed(case, every, row_of, [1] * len(every)), together)
    for token in every[:: len(every) // 7]:
        alone = token.unsqueeze(0)
        assert torch.equal(computed(case, alone, row_of[alone], [1]), together[alone])
    for piece in (2, 37, 100):
        cut = [min(piece, count - begin) for count in counts for begin in range(0, count, piece)]
        first = torch.tensor(cut, device=CUDA).cumsum(0) - 1
        assert torch.equal(computed(case, every, row_of[first], cut), together), piece
