"""What ``config.json`` says of latent attention, as the hub has it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.actors.model.config import ModelConfig, ModelError, default_positions, parse_config
from pagebus.actors.model.spec import Dense, Mla, Moe

V2_LITE = SHAPES["deepseek-v2-lite"]
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.X"},
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840, "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config(raw | changes, {})


def test_deepseek_v2_lite() -> None:
    """One dense layer, then 64 experts and two that all tokens share; 576 numbers of a token in each layer's cache."""
    config = parse(V2_LITE)
    mixer, moe = config.latent, config.spec.layers[1].feed
    assert mixer is not None
    assert (mixer.q_rank, mixer.kv_rank, mixer.nope_dim, mixer.rope_dim, mixer.v_head_dim) == (0, 512, 128, 64, 128)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert config.spec.layers[0].feed == Dense(10944)
    assert moe == Moe(64, 6, 1408, renormalise=False, shared=Dense(2816))
    assert (config.num_kv_heads, config.head_dim) == (1, 576)
    assert config.spec.kv_numbers() == 27 * 576
    assert (config.spec.rope[0].layout, config.spec.rope[0].attention_factor) == ("pairs", 1.0)
    assert default_positions(config) == 163840
    assert mixer.projected == 16 * 192 + 576
    assert 2.2e9 < config.spec.layer_weights() < 2.5e9


def test_deepseek_v3() -> None:
    """Sigmoids with a bias, groups by the sum of two; code that comes with it is not needed; the layer that guesses
    the token after next is not read."""
    config = parse(V3)
    moe = config.spec.layers[3].feed
    assert [isinstance(layer.feed, Moe) for layer in config.spec.layers[:4]] == [False, False, False, True]
    assert moe == Moe(
        256, 8, 2048, score="sigmoid", factor=2.5, groups=8, keep_groups=4, group_score="top2", choice_bias=True,
        shared=Dense(2048),
    )  # fmt: skip
    assert config.latent is not None
    assert config.latent.q_rank == 1536
    assert config.spec.kv_numbers() * 2 == 70272
    assert config.names.ours("model.layers.61.self_attn.q_a_proj.weight") is None
    kept = config.names.ours("model.layers.60.mlp.shared_experts.up_proj.weight")
    assert kept == "model.layers.60.mlp.shared_expert.up_proj.weight"


def test_deepseek_v2_judges_groups_by_their_best() -> None:
    """And weighs by the softmax as it is, times a factor."""
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    moe = parse(V2_LITE, **grouped).spec.layers[1].feed
    assert isinstance(moe, Moe)
    assert (moe.groups, moe.keep_groups, moe.group_score, moe.factor) == (8, 3, "max", 16.0)
    assert not moe.renormalise
    plain = parse(V2_LITE, n_group=8, topk_group=3).spec.layers[1].feed
    assert isinstance(plain, Moe)
    assert plain.groups == 1


def test_glm_flash_and_mistral_4() -> None:
    """GLM's first layer is dense; Mistral's queries grow, and it may be the tower of a model with images."""
    glm = {**V3, "architectures": ["Glm4MoeLiteForCausalLM"], "qk_nope_head_dim": 192, "v_head_dim": 256}
    glm |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "rope_scaling": None}
    layers = parse({key: value for key, value in glm.items() if key != "first_k_dense_replace"}).spec.layers
    assert [isinstance(layer.feed, Moe) for layer in layers[:2]] == [False, True]
    rope = {
        "type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    text = {
        "model_type": "mistral4", "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64,
        "rope_parameters": rope, "max_position_embeddings": 1048576, "vocab_size": 131072, "hidden_size": 4096,
        "num_hidden_layers": 2,
    }  # fmt: skip
    config = parse({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert config.latent is not None
    assert config.latent.position_scale is not None
    assert config.spec.rope[0].dims == 64
    assert config.spec.kv_numbers() == 2 * 320


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 2}, "n_group 7"),
        ({"topk_method": "group_limited_greedy", "n_group": 32, "topk_group": 2}, "more than topk_group"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    """By the field's name."""
    with pytest.raises(ModelError, match=message):
        parse(V2_LITE, **changes)


def test_latents_are_one_kv_head() -> None:
    """For all who ask for a cache of keys and values: one tensor, half of what they would take for two."""
    mixer = parse(V2_LITE).spec.layers[0].mixer
    assert isinstance(mixer, Mla)
    assert (mixer.kv_parts, mixer.kv_heads, mixer.head_dim, mixer.window) == (1, 1, 576, 0)
    assert mixer.flops_per_pair() == 2 * 16 * (576 + 512)
