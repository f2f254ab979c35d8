"""Files of families as the hub has them: fields and tensors' names that transformers 5 would write otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.model.config import ModelError, parse_config
from pagebus.actors.model.families.experts import granite_moe
from pagebus.actors.model.families.internlm import INTERNLM2
from pagebus.actors.model.spec import Dense, Moe, QueryScale
from tests.actors.model.test_families import BASE, parse

GLM = {
    "num_hidden_layers": 4, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
SCOUT: dict[str, Any] = {
    **BASE, "model_type": "llama4_text", "head_dim": 128, "num_hidden_layers": 8, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1, "attention_chunk_size": 8192,
    "no_rope_layers": [], "interleave_moe_layer_step": 1, "use_qk_norm": True, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


def test_glm_air() -> None:
    """GLM-4.5-Air's fields; the layer behind the last, which predicts a second token, is not read."""
    config = parse("Glm4MoeForCausalLM", **GLM)
    moe = Moe(128, 8, 1408, score="sigmoid", group_score="top2", choice_bias=True, shared=Dense(1408))
    assert [layer.feed for layer in config.spec.layers] == [Dense(128), moe, moe, moe]
    assert (config.spec.rope[0].dims, config.spec.rope[0].layout) == (16, "half")
    assert (config.spec.layers[0].mixer.bias, config.spec.layers[0].mixer.out_bias) == (True, False)
    assert config.names.ours("model.layers.4.eh_proj.weight") is None
    shared = config.names.ours("model.layers.3.mlp.shared_experts.up_proj.weight")
    assert shared == "model.layers.3.mlp.shared_expert.up_proj.weight"
    without = parse("Glm4MoeForCausalLM", **GLM | {"num_nextn_predict_layers": 0})
    assert without.names.ours("model.layers.4.eh_proj.weight") is not None


def test_llama4_scout() -> None:
    """The text of Llama 4 Scout: three layers in four see chunks, the fourth all, with a temperature."""
    raw = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": SCOUT, "vision_config": {}}
    config = parse_config(raw, {})
    mixers = [layer.mixer for layer in config.spec.layers]
    assert config.layer_windows == (-8192, -8192, -8192, 0) * 2
    assert [mixer.rope for mixer in mixers] == [0, 0, 0, None] * 2
    assert [mixer.qk_norm for mixer in mixers[:4]] == ["unit", "unit", "unit", "none"]
    assert [mixer.position_scale for mixer in mixers[2:4]] == [None, QueryScale(0.1, 8192, shift=1)]
    moe = Moe(16, 1, 8192, score="sigmoid", renormalise=False, weight_on_input=True, shared=Dense(8192))
    assert {layer.feed for layer in config.spec.layers} == {moe}
    router = config.names.ours("language_model.model.layers.0.feed_forward.router.weight")
    assert router == "model.layers.0.mlp.gate.weight"
    assert config.names.ours("vision_model.class_embedding") is None


def test_llama4_maverick() -> None:
    """Experts in every second layer, no norms of heads, dense layers of another width."""
    fields = SCOUT | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "no_rope_layers": [1, 1, 1, 0] * 2}
    spec = parse("Llama4ForCausalLM", **fields).spec
    assert [isinstance(layer.feed, Moe) for layer in spec.layers] == [False, True] * 4
    assert spec.layers[0].feed == Dense(16384)
    assert {layer.mixer.qk_norm for layer in spec.layers} == {"none"}


def test_internlm3_biases_may_differ() -> None:
    """``qkv_bias`` is of queries, keys and values alone, ``bias`` of all other products."""
    layer = parse("InternLM3ForCausalLM", qkv_bias=True, bias=False).spec.layers[0]
    assert (layer.mixer.bias, layer.mixer.out_bias, layer.feed) == (True, False, Dense(128))
    layer = parse("InternLM3ForCausalLM", qkv_bias=False, bias=True).spec.layers[0]
    assert (layer.mixer.bias, layer.mixer.out_bias, layer.feed) == (False, True, Dense(128, bias=True))


def test_starcoder() -> None:
    """StarCoder2-7B's fields: ties, biases and GELU where the file is silent."""
    config = parse("Starcoder2ForCausalLM", sliding_window=4096, norm_epsilon=1e-5)
    assert config.layer_windows == (4096,) * 4
    assert (config.spec.norm.kind, config.spec.norm.bias, config.tie_word_embeddings) == ("layer", True, True)
    assert config.spec.layers[0].feed == Dense(128, "gelu_tanh", gated=False, bias=True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.experts.down_proj", "mlp.experts.down_proj"),
        ("block_sparse_moe.router.layer.weight", "mlp.gate.weight"),
        ("block_sparse_moe.router.weight", "mlp.gate.weight"),
        ("shared_mlp.output_linear.weight", "mlp.shared_expert.down_proj.weight"),
    ],
)
def test_granite_by_both_spellings(theirs: str, ours: str) -> None:
    """The hub's, and transformers 5's."""
    assert granite_moe.NAMES.ours(f"model.layers.1.{theirs}") == f"model.layers.1.{ours}"


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Glm4MoeForCausalLM", GLM | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("Llama4ForCausalLM", SCOUT | {"moe_layers": "all"}, "moe_layers must be a list"),
        ("Llama4ForCausalLM", SCOUT | {"layer_types": ["sliding_attention"] * 8}, "'sliding_attention' is not"),
        ("Llama4ForCausalLM", SCOUT | {"num_experts_per_tok": 17}, "more than there are experts"),
        ("Starcoder2ForCausalLM", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("GraniteMoeSharedForCausalLM", {"shared_intermediate_size": -1}, "shared_intermediate_size is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(architecture: str, fields: dict[str, Any], message: str) -> None:
    """By the field's name."""
    with pytest.raises(ModelError, match=message):
        parse(architecture, **fields)


def test_internlm2_names() -> None:
    """Those outside of layers too."""
    names = INTERNLM2.names
    assert names.ours("model.tok_embeddings.weight") == "model.embed_tokens.weight"
    assert names.ours("output.weight") == "lm_head.weight"
    assert names.ours("model.norm.weight") == "model.norm.weight"
    assert names.ours("model.layers.0.attention.wo.weight") == "model.layers.0.self_attn.o_proj.weight"
