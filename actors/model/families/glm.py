"""GLM-4, dense: half of each head turns, by pairs of neighbours. ``Glm`` has norms before both parts, ``Glm4`` also
behind them."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec

ACTIVATIONS = {"silu": "silu"}


def parse(fields: Fields) -> ModelSpec:
    """All layers alike."""
    head_dim = fields.head_dim(128)
    heads, kv_heads = fields.integer("num_attention_heads"), fields.kv_heads()
    mixer = Gqa(heads, kv_heads, head_dim, head_dim**-0.5, bias=bool(fields.get("attention_bias", True)))
    feed = Dense(fields.integer("intermediate_size"), fields.word("hidden_act", "silu", ACTIVATIONS))
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=(LayerSpec(mixer, feed),) * fields.integer("num_hidden_layers"),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1.5625e-7)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim, partial=0.5, layout="pairs"),),
    )


def parse4(fields: Fields) -> ModelSpec:
    """The same with norms on both sides."""
    spec = parse(fields)
    return replace(spec, layers=tuple(replace(layer, norms="sandwich") for layer in spec.layers))


ODD = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 48, "attention_bias": True}
WHOLE = {"partial_rotary_factor": 1.0}
FUSED = NameMap(gate_up="gate_up_proj")
GLM = Family(
    name="GLM-4",
    architectures=("GlmForCausalLM",),
    model_type="glm",
    parse=parse,
    names=FUSED,
    golden={"glm": {}, "glm-odd": ODD, "glm-tied": {**WHOLE, "tie_word_embeddings": True}},
    differs="half of each head turns, by neighbours",
)
GLM4 = Family(
    name="GLM-4 0414",
    architectures=("Glm4ForCausalLM",),
    model_type="glm4",
    parse=parse4,
    names=replace(
        FUSED,
        renamed=(
            ("post_attention_layernorm", "pre_feedforward_layernorm"),
            ("post_self_attn_layernorm", "post_attention_layernorm"),
            ("post_mlp_layernorm", "post_feedforward_layernorm"),
        ),
    ),
    golden={"glm4": {}, "glm4-odd": ODD, "glm4-tied": {**WHOLE, "tie_word_embeddings": True}},
    differs="the same with norms on both sides of both parts",
)
