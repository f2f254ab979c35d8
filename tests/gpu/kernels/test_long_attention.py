"""The kernel for long prompts over heads of other sizes than 128, windows and soft caps, on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.kernels.attention import hopper_prefill
from pagebus.kernels.attention.cudnn_prefill import LongRow
from tests.gpu.kernels.cases import CUDA, relative_error
from tests.gpu.kernels.test_attention import expected_attention
from tests.kernels.attention.cases import AttentionCase, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
    pytest.mark.usefixtures("seeded"),
]

LONG_SHAPES = {  # query heads, KV heads, head dim, window, soft cap, format
    "gemma3": (16, 8, 256, 1024, 0.0, torch.bfloat16),
    "gemma3_full": (16, 8, 256, 0, 0.0, torch.bfloat16),
    "gemma2": (8, 4, 256, 0, 30.0, torch.bfloat16),
    "gemma2_window": (16, 8, 128, 700, 50.0, torch.bfloat16),
    "gptoss": (64, 8, 64, 128, 0.0, torch.bfloat16),
    "smollm": (15, 5, 64, 0, 0.0, torch.float16),
    "phi": (32, 32, 96, 300, 0.0, torch.bfloat16),
    "phi_full": (32, 32, 96, 0, 0.0, torch.float16),
    "head80": (12, 4, 80, 0, 0.0, torch.bfloat16),
    "head192": (8, 2, 192, 500, 0.0, torch.float16),
    "mistral": (32, 8, 128, 4096, 0.0, torch.bfloat16),
    "one_key": (8, 4, 128, 1, 0.0, torch.bfloat16),
    "half": (32, 8, 128, 0, 0.0, torch.float16),
}


def long_rows(case: AttentionCase) -> list[LongRow]:
    starts = [sum(case.query_lens[:row]) for row in range(len(case.query_lens))]
    return [LongRow(row, *of) for row, of in enumerate(zip(starts, case.query_lens, case.context_lens, strict=True))]


def long_attention(case: AttentionCase, rows: list[LongRow], **keywords: Any) -> torch.Tensor:
    """What the kernel for long prompts makes of these rows; elsewhere 7."""
    words, out = case.keywords, torch.full_like(case.q, 7.0)
    hopper_prefill.hopper_attention(
        case.q, case.k_cache, case.v_cache, out, words["slots"], words["block_tables"], words["scale"], rows,
        words["kv_scales"], sliding_window=words["sliding_window"], softcap=words["softcap"], **keywords,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("shape", LONG_SHAPES)
@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [([1], [1]), ([129], [1]), ([1000], [300]), ([5003], [2500]), ([9001], [500]), ([20000], [1000]),
     ([128, 256, 384], [128, 128, 384]), ([700, 3001, 64, 5000], [650, 129, 64, 2000]), ([2048] * 4, [2048] * 4)],
)  # fmt: skip
def test_long_attention_of_other_heads(shape: str, context_lens: list[int], query_lens: list[int]) -> None:
    """Windows, soft caps, heads of other sizes and float16, against the definition in float32; again with the same
    bits; a row alone like all together."""
    q_heads, kv_heads, head_dim, window, softcap, dtype = LONG_SHAPES[shape]
    case = make_case(
        context_lens, query_lens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
        softcap=softcap, dtype=dtype, device=CUDA,
    )  # fmt: skip
    rows = long_rows(case)
    out = long_attention(case, rows)
    expected = expected_attention(case, case.keywords)
    assert relative_error(out, expected) < 8e-3
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(long_attention(case, rows), out)
    alone = long_attention(case, rows[-1:])
    assert (alone[: rows[-1].first_token] == 7.0).all()
    torch.testing.assert_close(alone[rows[-1].first_token :], out[rows[-1].first_token :], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [50.0, 64.0, 80.0])
def test_long_attention_at_the_cap(softcap: float, dtype: torch.dtype) -> None:
    """Most scores are the soft cap or its negative, and some queries see only the latter: small caps are not subtracted
    in bfloat16, others are."""
    case = make_case([700, 3001], [650, 3001], q_heads=8, kv_heads=4, head_dim=128, softcap=softcap, dtype=dtype,
                     device=CUDA)  # fmt: skip
    case.q.mul_(200)
    out, expected = long_attention(case, long_rows(case)), expected_attention(case, case.keywords)
    assert out.isfinite().all()
    assert relative_error(out, expected) < 3e-2


@pytest.mark.parametrize("shape", ["gemma3", "gptoss", "phi", "half"])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8])
def test_long_attention_over_one_byte(shape: str, cache_dtype: torch.dtype) -> None:
    q_heads, kv_heads, head_dim, window, softcap, dtype = LONG_SHAPES[shape]
    case = make_case(
        [700, 3001, 5000], [650, 129, 2000], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
        softcap=softcap, dtype=dtype, cache_dtype=cache_dtype, device=CUDA,
    )  # fmt: skip
    assert relative_error(long_attention(case, long_rows(case)), expected_attention(case, case.keywords)) < 1e-2


@pytest.mark.parametrize("shape", ["gemma3", "gemma3_full", "gptoss", "mistral"])
def test_long_attention_reads_projected_keys(shape: str) -> None:
    """Of prompts of whole tiles, whose heads are not padded: the same bits as from copies."""
    q_heads, kv_heads, head_dim, window, softcap, dtype = LONG_SHAPES[shape]
    lens = [384, 2048, 1152]
    case = make_case(
        lens, lens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window, softcap=softcap, dtype=dtype,
        device=CUDA,
    )  # fmt: skip
    rows = long_rows(case)
    assert torch.equal(long_attention(case, rows, projected=case.projected()), long_attention(case, rows))
