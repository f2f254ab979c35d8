"""SmolLM3: Llama in which every fourth layer turns nothing."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families import llama
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec


def parse(fields: Fields) -> ModelSpec:
    """Layers that turn their heads, and those that do not; the latter may have a window."""
    spec, step = llama.parse(fields), fields.integer("no_rope_layer_interval", 4)
    count = len(spec.layers)
    turning = fields.layer_flags("no_rope_layers") or tuple((index + 1) % step != 0 for index in range(count))
    window = 0
    if fields.flag("use_sliding_window") and fields.get("sliding_window") is not None:
        window = fields.integer("sliding_window")
    default = tuple("full_attention" if turns else "sliding_attention" for turns in turning)
    types, layer = fields.layer_types(default), spec.layers[0]
    layers = tuple(
        replace(
            layer,
            mixer=replace(layer.mixer, rope=0 if turns else None, window=window if kind == "sliding_attention" else 0),
        )
        for turns, kind in zip(turning, types, strict=True)
    )
    return replace(spec, layers=layers)


LAYERS = {"num_hidden_layers": 4, "no_rope_layer_interval": 2}
FAMILY = Family(
    name="SmolLM3",
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    parse=parse,
    defaults={"tie_word_embeddings": True},
    golden={
        "smollm3": LAYERS,
        "smollm3-odd": {
            **LAYERS, "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
        },
        "smollm3-window": {**LAYERS, "use_sliding_window": True, "sliding_window": 20, "tie_word_embeddings": True},
    },
    differs="every fourth layer turns nothing",
)  # fmt: skip
