"""Granite 3, dense: Llama with factors on the embedding, on scores, on what is added, and on logits."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families import llama
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import HeadSpec, LayerSpec, ModelSpec


def parse(fields: Fields) -> ModelSpec:
    """All layers alike."""
    spec = llama.parse(fields)
    mixer = replace(spec.layers[0].mixer, scale=fields.number("attention_multiplier", 1.0))
    layer = LayerSpec(mixer, spec.layers[0].feed, residual_scale=fields.number("residual_multiplier", 1.0))
    return replace(
        spec,
        layers=(layer,) * len(spec.layers),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        head=HeadSpec(spec.head.tied, scale=1 / fields.number("logits_scaling", 1.0)),
    )


FACTORS = {
    "attention_multiplier": 0.2, "residual_multiplier": 0.375, "embedding_multiplier": 3.0, "logits_scaling": 4.0,
}  # fmt: skip
FAMILY = Family(
    name="Granite 3",
    architectures=("GraniteForCausalLM",),
    model_type="granite",
    parse=parse,
    golden={
        "granite": FACTORS,
        "granite-odd": {**FACTORS, "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1},
        "granite-biased": {**FACTORS, "attention_bias": True, "mlp_bias": True},
    },
    differs="factors on embedding, scores, what is added, logits",
)
