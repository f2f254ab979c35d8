"""Llama 2 and 3, and what is Llama by name (SmolLM2, Yi, Falcon 3, R1-Distill-Llama)."""

from __future__ import annotations

from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec

ACTIVATIONS = {"silu": "silu"}


def parse(fields: Fields) -> ModelSpec:
    """All layers alike; ``attention_bias`` and ``mlp_bias`` are biases of all their products."""
    head_dim, bias = fields.head_dim(), fields.flag("attention_bias")
    mixer = Gqa(
        fields.integer("num_attention_heads"), fields.kv_heads(optional=True), head_dim, head_dim**-0.5,
        bias=bias, out_bias=bias,
    )  # fmt: skip
    act = fields.word("hidden_act", "silu", ACTIVATIONS)
    feed = Dense(fields.integer("intermediate_size"), act, bias=fields.flag("mlp_bias"))
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=(LayerSpec(mixer, feed),) * fields.integer("num_hidden_layers"),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim),),
    )


def _yarn(factor: float, original: int) -> dict[str, object]:
    return {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": original,
    }  # fmt: skip


FAMILY = Family(
    name="Llama 2, 3 and what is Llama by name (SmolLM2, Yi, Falcon 3, R1-Distill-Llama)",
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    parse=parse,
    golden={
        "llama-yarn": {
            "hidden_size": 84, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 48,
            "rope_parameters": _yarn(8.0, 64),
        },
        "llama-dynamic": {
            "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
            "tie_word_embeddings": True, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0},
        },
        "llama-linear": {
            "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64,
            "attention_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 3e3, "factor": 4.0},
        },
    },
    differs="",
)  # fmt: skip
