"""Phi-3, 3.5 and 4: Llama with fused products, whose heads may turn in part and by long factors."""

from __future__ import annotations

from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec

ACTIVATIONS = {"silu": "silu"}


def parse(fields: Fields) -> ModelSpec:
    """All layers alike, with one window or none."""
    head_dim, window = fields.head_dim(), 0
    if fields.get("sliding_window") is not None:
        window = fields.integer("sliding_window")
    heads, kv_heads = fields.integer("num_attention_heads"), fields.kv_heads(optional=True)
    mixer = Gqa(heads, kv_heads, head_dim, head_dim**-0.5, window)
    feed = Dense(fields.integer("intermediate_size"), fields.word("hidden_act", "silu", ACTIVATIONS))
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=(LayerSpec(mixer, feed),) * fields.integer("num_hidden_layers"),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim, partial=1.0),),
    )


def _long(pairs: int) -> dict[str, object]:
    """Factors for this many pairs."""
    short, long = [1.0 + 0.01 * pair for pair in range(pairs)], [1.0 + 0.5 * pair for pair in range(pairs)]
    return {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}


FAMILY = Family(
    name="Phi-3, 3.5, 4",
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    parse=parse,
    names=NameMap(qkv="qkv_proj", gate_up="gate_up_proj"),
    defaults={"original_max_position_embeddings": 4096},
    golden={
        "phi3": {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 21},
        "phi3-partial": {
            "hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1, "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
        "phi3-long": {
            "hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3, "rope_parameters": _long(32),
            "original_max_position_embeddings": 300,
        },
    },
    differs="fused tensors, heads of 96 that may turn in part, longrope",
)  # fmt: skip
