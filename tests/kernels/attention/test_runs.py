"""Attention of rows with a few queries each, as decodes with drafts have them, by the decode kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.kernels.attention.paged_attention import (
    AttentionShape,
    paged_attention,
    paged_attention_reference,
    plan_attention,
)
from tests.kernels.attention.cases import make_case
from tests.kernels.attention.test_paged_attention import TOLERANCE

pytestmark = pytest.mark.share(6)

MOST = 5
MIXED: dict[str, Any] = {"context_lens": [17, 1, 150, 64, 0, 40, 300, 33, 5], "query_lens": [1, 1, 5, 2, 3, 1, 4, 5, 5]}
CASES: dict[str, dict[str, Any]] = {
    "groups": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64},
    "groups_half": {**MIXED, "q_heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": torch.float16},
    "alone": {**MIXED, "q_heads": 3, "kv_heads": 3, "head_dim": 32},
    "window": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "window": 20},
    "window_of_two_half": {**MIXED, "q_heads": 2, "kv_heads": 1, "head_dim": 64, "window": 2, "dtype": torch.float16},
    "window_of_a_tile": {**MIXED, "q_heads": 2, "kv_heads": 1, "head_dim": 64, "window": 62, "dtype": torch.float16},
    "chunks": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "window": -31},
    "softcap_sinks": {**MIXED, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "softcap": 0.7, "sinks": True},
    "sinks_half_window": {**MIXED, "q_heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16, "window": 70,
                          "sinks": True},
    "float8_half": {**MIXED, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16,
                    "cache_dtype": torch.float8_e4m3fn},
    "head_80_block_48": {"context_lens": [100, 50], "query_lens": [5, 3], "q_heads": 3, "kv_heads": 1, "head_dim": 80,
                         "block_size": 48},
    "one_long_row": {"context_lens": [900], "query_lens": [5], "q_heads": 4, "kv_heads": 1, "head_dim": 64,
                     "dtype": torch.float16},
}  # fmt: skip


@pytest.mark.parametrize(("name", "padding"), [("groups", 0), *((name, 3) for name in CASES)])
def test_runs_are_the_reference(name: str, padding: int, device: torch.device) -> None:
    """Rows are cut wherever a program's share ends, also where a query sees nothing of a piece; what rows and tokens of
    nothing give nobody reads."""
    case = make_case(**CASES[name], device=device, padding=padding)
    words, q_heads, head_dim = case.keywords, case.q.shape[1], case.q.shape[2]
    expected = paged_attention_reference(case.q, case.k_cache, case.v_cache, **words)
    pad, num_tokens = torch.nn.functional.pad, sum(case.query_lens)
    padded = words | {
        "slots": pad(words["slots"], (0, padding)),
        "query_start": pad(words["query_start"], (0, padding), value=num_tokens),
        "context_lens": pad(words["context_lens"], (0, padding)),
        "num_decodes": 0,
    }
    shape = AttentionShape(
        q_heads, case.k_cache.shape[2], head_dim, case.q.element_size(), frozenset({words["sliding_window"]}),
        float8=words["kv_scales"] is not None, run=MOST,
    )  # fmt: skip
    plan = plan_attention(
        padded["slots"], padded["context_lens"], shape, query_start=padded["query_start"], settled=False
    )
    out, live = torch.full_like(case.q, torch.nan), case.live()
    paged_attention(case.q, case.k_cache, case.v_cache, **padded, plan=plan, out=out)
    torch.testing.assert_close(out[live], expected[live], atol=TOLERANCE[case.q.dtype], rtol=1e-3)
    if device.type == "cpu":  # programs are few there
        assert int((plan.decodes[words["sliding_window"]].merges[:, 2] > 1).sum()) > 0 or "window" in name
