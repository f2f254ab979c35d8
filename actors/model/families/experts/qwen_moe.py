"""Qwen 2 and 3 with experts: some layers, or all, have a mixture instead of the dense feed-forward part."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families import qwen
from pagebus.actors.model.families.experts.fields import checked, num_experts, sparse_layers
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import Dense, ModelSpec, Moe


def parse2(fields: Fields) -> ModelSpec:
    """A shared expert beside the chosen ones, times a sigmoid; biases by ``qkv_bias``."""
    spec, bias = qwen.parse2(fields), bool(fields.get("qkv_bias", True))
    shared = Dense(fields.integer("shared_expert_intermediate_size"))
    windows = _windows2(fields)
    mixers = [
        replace(layer.mixer, bias=bias, window=window) for layer, window in zip(spec.layers, windows, strict=True)
    ]
    layers = [replace(layer, mixer=mixer) for layer, mixer in zip(spec.layers, mixers, strict=True)]
    return _with_experts(replace(spec, layers=tuple(layers)), fields, shared)


def parse3(fields: Fields) -> ModelSpec:
    """No shared expert; one window in all layers, or none."""
    spec = qwen.parse3(Fields({**fields.raw, "head_dim": fields.head_dim()}))
    window = qwen.qwen_window(fields)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for layer in spec.layers)
    return _with_experts(replace(spec, layers=layers), fields, None)


def _windows2(fields: Fields) -> tuple[int, ...]:
    """As transformers has them where the file does not say: of every second of the first ``max_window_layers``."""
    if fields.get("layer_types") is not None:
        return qwen.qwen_windows(fields)
    count, first = fields.integer("num_hidden_layers"), fields.count("max_window_layers", 28)
    window = qwen.qwen_window(fields)
    return tuple(window if index % 2 == 0 and index < first else 0 for index in range(count))


def _with_experts(spec: ModelSpec, fields: Fields, shared: Dense | None) -> ModelSpec:
    moe = checked(
        Moe(
            num_experts(fields), fields.integer("num_experts_per_tok"), fields.integer("moe_intermediate_size"),
            renormalise=fields.flag("norm_topk_prob"), shared=shared, shared_gate=shared is not None,
        )
    )  # fmt: skip
    layers = (
        replace(layer, feed=moe) if sparse else layer
        for layer, sparse in zip(spec.layers, sparse_layers(fields), strict=True)
    )
    return replace(spec, layers=tuple(layers))


SMALL = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SHARED = {**SMALL, "shared_expert_intermediate_size": 72}
ODD = {"num_hidden_layers": 4, "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
QWEN2_MOE = Family(
    name="Qwen 2 MoE (Qwen1.5-MoE, Qwen2-57B-A14B)",
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    parse=parse2,
    defaults={"intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    golden={
        "qwen2-moe": {**SHARED, "num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": True},
        "qwen2-moe-odd": {**SHARED, **ODD, "num_experts": 7, "mlp_only_layers": [1], "qkv_bias": False},
        "qwen2-moe-window": {
            **SHARED, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    },
    differs="Qwen 2 with experts, and one that all tokens share, times a sigmoid",
)  # fmt: skip
QWEN3_MOE = Family(
    name="Qwen 3 MoE (30B-A3B, 235B-A22B, Coder)",
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    parse=parse3,
    defaults={"intermediate_size": 6144, "moe_intermediate_size": 768},
    golden={
        "qwen3-moe": {**SMALL, "num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": True},
        "qwen3-moe-odd": {
            **SMALL, **ODD, "num_experts": 13, "moe_intermediate_size": 56, "decoder_sparse_step": 2,
            "attention_bias": True,
        },
        "qwen3-moe-window": {
            **SMALL, "head_dim": 96, "use_sliding_window": True, "sliding_window": 21, "tie_word_embeddings": True,
        },
    },
    differs="Qwen 3 with experts",
)  # fmt: skip
