"""MiniCPM3: dense, with factors on the embedding, on what is added and on logits."""

from __future__ import annotations

import math
from dataclasses import replace

from pagebus.actors.model.families.experts.feeds import dense
from pagebus.actors.model.families.latent.golden import ODD, SMALL
from pagebus.actors.model.families.latent.parts import decoder
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import HeadSpec, ModelSpec


def parse(fields: Fields) -> ModelSpec:
    """All layers alike; null means a factor of 1."""
    count, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    if fields.get("v_head_dim") is None:
        fields = Fields({**fields.raw, "v_head_dim": hidden // fields.integer("num_attention_heads")})
    spec = decoder(fields, (dense(fields),) * count, "half")
    depth = fields.number("scale_depth", math.sqrt(count)) / math.sqrt(count)
    head = HeadSpec(spec.head.tied, scale=fields.integer("dim_model_base", hidden) / hidden)
    layers = tuple(replace(layer, residual_scale=depth) for layer in spec.layers)
    return replace(spec, layers=layers, head=head, embed_scale=fields.number("scale_emb", 1.0))


PARTS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_hidden_layers")
LATENTS = {key: SMALL[key] for key in (*PARTS, "num_attention_heads", "num_key_value_heads")}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
    "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 2.0, 3.5, 4.0],
}  # fmt: skip
MINICPM3 = Family(
    name="MiniCPM3",
    differs="latents hold keys and values; dense; factors on embedding, what is added, logits",
    architectures=("MiniCPM3ForCausalLM",),
    model_type="minicpm3",
    parse=parse,
    defaults={
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12,
        "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
        "num_attention_heads": 40, "vocab_size": 73448,
    },
    golden={
        "minicpm3": {**LATENTS, "q_lora_rank": 24, "dim_model_base": 32},
        "minicpm3-odd": {
            **LATENTS, **{key: value for key, value in ODD.items() if key in (*LATENTS, "hidden_size")},
            "attention_bias": True, "scale_depth": 2.0, "scale_emb": 3,
        },
        "minicpm3-long": {
            **LATENTS, "v_head_dim": None, "scale_emb": 3, "rope_parameters": LONG, "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
