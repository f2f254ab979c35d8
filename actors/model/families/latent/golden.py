"""Fields that tiny models with latent attention share."""

from __future__ import annotations

from typing import Any

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 40,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
QUERIES = {"q_lora_rank": 24, "attention_bias": True}
ODD: dict[str, Any] = {
    "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 40, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 12, "head_dim": 12, "v_head_dim": 20, "n_shared_experts": 1, "n_routed_experts": 7,
    "num_experts_per_tok": 2,
}  # fmt: skip
