"""What ``config.json`` says of experts, as the hub has it and as transformers 5 writes it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagebus.actors.model.config import ModelError, parse_config
from pagebus.actors.model.spec import Dense, Moe
from tests.actors.model.test_families import BASE, parse

QWEN3 = {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 4, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip


def test_qwen3() -> None:
    """Qwen3-30B-A3B's fields; its head_dim is not the default of Qwen 3 where it is left out."""
    config = parse("Qwen3MoeForCausalLM", **QWEN3)
    assert {layer.feed for layer in config.spec.layers} == {Moe(128, 8, 768)}
    assert config.layer_windows == (0, 0, 0, 0)
    assert config.spec.layers[0].mixer.qk_norm == "head"
    assert parse("Qwen3MoeForCausalLM", **QWEN3 | {"head_dim": None}).head_dim == 16
    as_saved = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert parse("Qwen3MoeForCausalLM", **as_saved).spec == config.spec


def test_which_layers_have_experts() -> None:
    """Each ``decoder_sparse_step``-th, but those that are to be dense."""
    config = parse("Qwen3MoeForCausalLM", **QWEN3, num_hidden_layers=6, intermediate_size=512)
    assert all(isinstance(layer.feed, Moe) for layer in config.spec.layers)
    some = QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}
    config = parse("Qwen3MoeForCausalLM", **some, num_hidden_layers=6, intermediate_size=512)
    dense, moe = Dense(512), Moe(128, 8, 768, renormalise=False)
    assert [layer.feed for layer in config.spec.layers] == [dense, moe, dense, dense, dense, moe]


def test_qwen2_shares_an_expert() -> None:
    """Qwen1.5-MoE-A2.7B's fields; an expert's weights are not divided by their sum unless told so."""
    fields = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
              "shared_expert_intermediate_size": 5632}  # fmt: skip
    spec = parse("Qwen2MoeForCausalLM", **fields).spec
    wanted = Moe(60, 4, 1408, renormalise=False, shared=Dense(5632), shared_gate=True)
    assert {layer.feed for layer in spec.layers} == {wanted}
    assert spec.layers[0].mixer.bias
    assert not parse("Qwen2MoeForCausalLM", **fields, qkv_bias=False).spec.layers[0].mixer.bias
    assert spec.layer_weights() == 4 * (64 * 32 * 12 + 64 * (60 + 3 * 4 * 1408) + 3 * 64 * 5632)


def test_qwen2_windows() -> None:
    """Of every second of the first layers, where no types are given."""
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "use_sliding_window": True, "sliding_window": 50}
    assert parse("Qwen2MoeForCausalLM", **fields, max_window_layers=3).layer_windows == (50, 0, 50, 0)
    assert parse("Qwen2MoeForCausalLM", **fields, layer_types=None).layer_windows == (50, 0, 50, 0)
    assert parse("Qwen2MoeForCausalLM", **fields | {"sliding_window": None}).layer_windows == (0,) * 4
    types = ["full_attention", "sliding_attention"] * 2
    assert parse("Qwen2MoeForCausalLM", **fields, layer_types=types).layer_windows == (0, 50, 0, 50)


def test_mixtral() -> None:
    """Mixtral-8x7B's fields, and transformers' values for what is left out: no window, unlike Mistral."""
    config = parse("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336)
    assert {layer.feed for layer in config.spec.layers} == {Moe(8, 2, 14336)}
    assert (config.layer_windows, config.spec.rope[0].base, config.spec.norm.eps) == ((0,) * 4, 1e6, 1e-5)


GPT_OSS = {
    "num_local_experts": 32, "experts_per_token": 4, "num_experts_per_tok": 4, "intermediate_size": 2880,
    "attention_bias": True, "hidden_act": "silu", "swiglu_limit": 7.0, "sliding_window": 128, "rope_theta": 150000,
    "initial_context_length": 4096, "max_position_embeddings": 131072, "vocab_size": 201088, "eos_token_id": 200002,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
}  # fmt: skip


def test_gpt_oss() -> None:
    """gpt-oss-20b's fields: what layers share, their windows, and angles that are stretched between whole pairs."""
    config = parse("GptOssForCausalLM", **GPT_OSS)
    wanted = Moe(
        32, 4, 2880, "swiglu_clamped", "softmax_of_top", router_bias=True, bias=True, limit=7.0, alpha=1.702
    )  # fmt: skip
    assert {layer.feed for layer in config.spec.layers} == {wanted}
    assert all(layer.mixer.sinks and layer.mixer.bias and layer.mixer.out_bias for layer in config.spec.layers)
    assert config.layer_windows == (128, 0, 128, 0)
    [rope] = config.spec.rope
    assert (rope.base, rope.kind, rope.truncate) == (150000.0, "yarn", False)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    plain = parse("GptOssForCausalLM", **{key: value for key, value in GPT_OSS.items() if not key.startswith("rope")})
    assert plain.spec == config.spec


def test_gpt_oss_ends_with_an_answer_or_a_call() -> None:
    """Whatever the files say; no other architecture does. Its reasoning has a format of its own."""
    raw = {"architectures": ["GptOssForCausalLM"], **BASE, **GPT_OSS}
    assert parse_config(raw, {}).eos_token_ids == (200002, 200012)
    assert parse_config(raw, {"eos_token_id": [200002, 199999, 200012]}).eos_token_ids == (200002, 199999, 200012)
    assert parse_config(raw | {"vocab_size": 1000}, {}).eos_token_ids == ()
    assert parse_config(raw, {}).reasoning_parser == "openai_gptoss"
    other = parse("Qwen3MoeForCausalLM", **QWEN3, vocab_size=201088, eos_token_id=7)
    assert (other.eos_token_ids, other.reasoning_parser) == ((7,), "")


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Qwen3MoeForCausalLM", QWEN3 | {"num_experts_per_tok": 129}, "129 is more than there are experts, 128"),
        ("Qwen3MoeForCausalLM", QWEN3 | {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list"),
        ("Qwen3MoeForCausalLM", QWEN3 | {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 8}, "config.json has no num_experts"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("GptOssForCausalLM", GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit is 0"),
        ("GptOssForCausalLM", GPT_OSS | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("GptOssForCausalLM", GPT_OSS | {"quantization_config": {"quant_method": "quip"}}, "quip"),
    ],
)
def test_what_cannot_be_computed_is_refused(architecture: str, fields: dict[str, Any], message: str) -> None:
    """By the field's name, or the architecture's."""
    with pytest.raises(ModelError, match=message):
        parse(architecture, **fields)
