"""What ``config.json`` says of experts, as the hub has it and as transformers 5 writes it."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.model.config import ModelError
from pagebus.actors.model.spec import Dense, Moe
from tests.actors.model.test_families import parse

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
    types = ["full_attention", "sliding_attention"] * 2
    assert parse("Qwen2MoeForCausalLM", **fields, layer_types=types).layer_windows == (0, 50, 0, 50)


def test_mixtral() -> None:
    """Mixtral-8x7B's fields, and transformers' values for what is left out: no window, unlike Mistral."""
    config = parse("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336)
    assert {layer.feed for layer in config.spec.layers} == {Moe(8, 2, 14336)}
    assert (config.layer_windows, config.spec.rope[0].base, config.spec.norm.eps) == ((0,) * 4, 1e6, 1e-5)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Qwen3MoeForCausalLM", QWEN3 | {"num_experts_per_tok": 129}, "129 is more than there are experts, 128"),
        ("Qwen3MoeForCausalLM", QWEN3 | {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list"),
        ("Qwen3MoeForCausalLM", QWEN3 | {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 8}, "config.json has no num_experts"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("GptOssForCausalLM", {}, "attention sinks, and a mixture of experts with biases"),
    ],
)
def test_what_cannot_be_computed_is_refused(architecture: str, fields: dict[str, Any], message: str) -> None:
    """By the field's name, or the architecture's."""
    with pytest.raises(ModelError, match=message):
        parse(architecture, **fields)
