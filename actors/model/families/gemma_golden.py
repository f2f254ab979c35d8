"""Tiny models of the Gemma families, and the fields that Gemma 3's files leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ODD = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64}
WIDE = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
CAPPED = {
    "num_hidden_layers": 4, "sliding_window": 20, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 12.0,
}  # fmt: skip
LOCAL = {"num_hidden_layers": 4, "sliding_window": 20, "query_pre_attn_scalar": 100, "sliding_window_pattern": 2}
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA1_GOLDEN: Mapping[str, Mapping[str, Any]] = {
    "gemma": {}, "gemma-odd": ODD, "gemma-wide": {**WIDE, "num_attention_heads": 3},
}  # fmt: skip
GEMMA2_GOLDEN: Mapping[str, Mapping[str, Any]] = {
    "gemma2": CAPPED, "gemma2-odd": {**CAPPED, **ODD}, "gemma2-wide": {**CAPPED, **WIDE, "sliding_window": 33},
}  # fmt: skip
GEMMA3_GOLDEN: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {**LOCAL, "rope_parameters": ROPES},
    "gemma3-odd": {**LOCAL, **ODD, "sliding_window_pattern": 3},
    "gemma3-wide": {**LOCAL, **WIDE, "rope_parameters": ROPES, "sliding_window": 33},
}
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
}  # fmt: skip
