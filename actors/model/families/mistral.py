"""Mistral, Ministral, Ministral 3, and the text towers of Mistral Small 3.1 and later and of Ministral 3."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.family import WITH_IMAGES, Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope, rope_fields
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec, QueryScale

ACTIVATIONS = {"silu": "silu"}
WINDOW = 4096
"""Of old Mistral files that do not speak of one."""


def parse(fields: Fields) -> ModelSpec:
    """All layers alike, with one window or none."""
    head_dim, window = fields.head_dim(), 0
    if fields.get("sliding_window", WINDOW) is not None:
        window = fields.integer("sliding_window", WINDOW)
    mixer = Gqa(
        fields.integer("num_attention_heads"), fields.kv_heads(), head_dim, head_dim**-0.5, window,
        position_scale=query_scale(fields),
    )  # fmt: skip
    feed = Dense(fields.integer("intermediate_size"), fields.word("hidden_act", "silu", ACTIVATIONS))
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=(LayerSpec(mixer, feed),) * fields.integer("num_hidden_layers"),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim),),
    )


def parse_ministral(fields: Fields) -> ModelSpec:
    """Mistral whose layers are listed: with the window or without."""
    spec = parse(fields)
    kinds = fields.layer_types(("sliding_attention",) * len(spec.layers))
    layers = (
        layer if kind == "sliding_attention" else replace(layer, mixer=replace(layer.mixer, window=0))
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def query_scale(fields: Fields) -> QueryScale | None:
    """Ministral 3's growth of queries beyond the positions of its first training."""
    said = Fields(rope_fields(fields))
    if not said.get("llama_4_scaling_beta"):
        return None
    return QueryScale(said.number("llama_4_scaling_beta"), said.integer("original_max_position_embeddings"))


YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
ODD = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 48}
MISTRAL = Family(
    name="Mistral, Mistral Small 3",
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    model_type="mistral",
    parse=parse,
    names=WITH_IMAGES,
    golden={
        "mistral": {**ODD, "sliding_window": 19},
        "mistral-full": {"num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": None},
        "mistral-tied": {"head_dim": 96, "sliding_window": 33, "tie_word_embeddings": True},
    },
    differs="a window in all layers, or none",
)
MINISTRAL = replace(
    MISTRAL,
    name="Ministral",
    architectures=("MinistralForCausalLM",),
    model_type="ministral",
    parse=parse_ministral,
    golden={
        "ministral": {**ODD, "sliding_window": 19, "layer_types": ["full_attention", "sliding_attention"]},
        "ministral-full": {"num_attention_heads": 6, "num_key_value_heads": 3, "layer_types": ["full_attention"] * 2},
        "ministral-tied": {"head_dim": 96, "sliding_window": 33, "tie_word_embeddings": True},
    },
    differs="Mistral with a window in some layers",
)
MINISTRAL3 = replace(
    MISTRAL,
    name="Ministral 3",
    architectures=("Ministral3ForCausalLM",),
    model_type="ministral3",
    defaults={"sliding_window": None, "rms_norm_eps": 1e-5},
    golden={
        "ministral3": {**ODD, "rope_parameters": YARN},
        "ministral3-tied": {"rope_parameters": {**YARN, "factor": 4.0}, "tie_word_embeddings": True},
        "ministral3-window": {"head_dim": 128, "sliding_window": 21, "rope_parameters": YARN},
    },
    differs="yarn; queries grow beyond the positions of the first training",
)
