"""DeepSeek V2, V2-Lite, V3 and R1, Kimi K2 (which is a V3), and GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.families.latent.parts import (
    NAMES,
    decoder,
    dense,
    dense_first,
    groups,
    layout_of,
    mixture,
    only,
)
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec, Moe

METHODS = {"greedy": False, "group_limited_greedy": True}
LAYER_FEEDS = ("dense", "sparse")


def parse2(fields: Fields) -> ModelSpec:
    """A softmax, whose weights are not renormalised; groups are judged by their best expert, if there are groups."""
    only(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob"):
        raise ModelError("config.json: norm_topk_prob is not supported (DeepSeek V2 has it false)")
    grouped = fields.word("topk_method", "greedy", METHODS)
    moe = mixture(fields, renormalise=False, **(groups(fields) if grouped else {}))
    return decoder(fields, dense_first(fields, moe, 0), "pairs")


def parse3(fields: Fields) -> ModelSpec:
    """Sigmoids with a bias for the choice; groups are judged by the sum of their best two."""
    return decoder(fields, dense_first(fields, _sigmoids(fields), 3), layout_of(fields))


def parse_glm(fields: Fields) -> ModelSpec:
    """As V3; layers may be listed in ``mlp_layer_types``."""
    kinds, moe, count = fields.get("mlp_layer_types"), _sigmoids(fields), fields.integer("num_hidden_layers")
    if kinds is None:
        return decoder(fields, dense_first(fields, moe, 1), layout_of(fields))
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in LAYER_FEEDS for kind in kinds):
        raise ModelError(f"config.json: mlp_layer_types must list {count} times {' or '.join(LAYER_FEEDS)}")
    return decoder(fields, [moe if kind == "sparse" else dense(fields) for kind in kinds], layout_of(fields))


def _sigmoids(fields: Fields) -> Moe:
    only(fields, "scoring_func", "sigmoid")
    only(fields, "topk_method", "noaux_tc")
    renormalise = bool(fields.get("norm_topk_prob", True))
    return mixture(
        fields, score="sigmoid", renormalise=renormalise, choice_bias=True, group_score="top2", **groups(fields)
    )


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
DEEPSEEK2 = Family(
    name="DeepSeek V2, V2-Lite",
    differs="experts behind dense layers, some of them shared; latents hold keys and values; V2 has groups of experts",
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    parse=parse2,
    names=NAMES,
    defaults={
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
    },
    golden={
        "deepseek-v2-lite": {**SMALL, "rope_parameters": YARN},
        "deepseek-v2": {**SMALL, **GROUPS, **QUERIES, "topk_method": "group_limited_greedy",
                        "routed_scaling_factor": 2.5},
        "deepseek-v2-odd": {**SMALL, **ODD, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    },
)  # fmt: skip
DEEPSEEK3 = Family(
    name="DeepSeek V3, R1, Kimi K2",
    differs="the same; sigmoids with a bias choose groups and experts",
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    parse=parse3,
    names=NAMES,
    defaults={
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "intermediate_size": 18432, "num_attention_heads": 128,
    },
    golden={
        "deepseek-v3": {**SMALL, **GROUPS, "q_lora_rank": 24, "rope_parameters": {**YARN, "mscale": 1.0,
                        "mscale_all_dim": 1.0}},
        "kimi-k2": {**SMALL, "q_lora_rank": 32, "n_shared_experts": 1, "routed_scaling_factor": 2.827},
        "deepseek-v3-odd": {**SMALL, **ODD, **QUERIES, "first_k_dense_replace": 0, "rope_interleave": False,
                            "norm_topk_prob": False, "tie_word_embeddings": True},
    },
)  # fmt: skip
GLM_FLASH = Family(
    name="GLM-4.7-Flash",
    differs="as DeepSeek V3, with one group",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    parse=parse_glm,
    names=NAMES,
    defaults={
        "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8, "norm_topk_prob": True, "intermediate_size": 10240, "rms_norm_eps": 1e-5,
        "num_attention_heads": 20,
    },
    golden={
        "glm4-moe-lite": {**SMALL, "q_lora_rank": 24, "v_head_dim": 32, "qk_nope_head_dim": 24},
        "glm4-moe-lite-odd": {**SMALL, **ODD, **QUERIES, "num_hidden_layers": 4,
                              "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
        "glm4-moe-lite-groups": {**SMALL, **GROUPS, "rope_interleave": False, "tie_word_embeddings": True},
    },
)  # fmt: skip
