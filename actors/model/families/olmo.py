"""OLMo 2 and 3: norms behind both parts and none before them, and norms over all heads at once."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families import llama
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields, every_nth
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import LayerSpec, ModelSpec, NormSpec, RopeSpec

SLIDING = "sliding_attention"


def parse2(fields: Fields) -> ModelSpec:
    """All layers alike."""
    spec = llama.parse(fields)
    layer = spec.layers[0]
    layer = LayerSpec(replace(layer.mixer, qk_norm="width"), layer.feed, "post")
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5), wide=True)
    return replace(spec, layers=(layer,) * len(spec.layers), norm=norm)


def parse3(fields: Fields) -> ModelSpec:
    """Three layers in four have a window, and angles that are not stretched."""
    types = fields.layer_types(every_nth(fields.integer("num_hidden_layers"), 4))
    window, said = fields.integer("sliding_window", 4096), fields.get("rope_parameters") or {}
    head_dim = fields.head_dim()
    kinds = {kind: kind if isinstance(said.get(kind), dict) else None for kind in ("full_attention", SLIDING)}
    full, local = (parse_rope(fields, head_dim, kind=kind) for kind in kinds.values())
    if kinds[SLIDING] is None:
        local = RopeSpec(head_dim, full.base)
    spec = parse2(Fields({**fields.raw, "rope_parameters": None, "rope_scaling": None}))
    layer = spec.layers[0]
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, window=window, rope=1)) if kind == SLIDING else layer
        for kind in types
    )
    return replace(spec, layers=layers, rope=(full, local))


ODD = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1}
LOCAL = {"num_hidden_layers": 4, "sliding_window": 20}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OLMO2 = Family(
    name="OLMo 2",
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    parse=parse2,
    golden={
        "olmo2": {},
        "olmo2-odd": ODD,
        "olmo2-wide": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48},
    },
    differs="norms behind both parts only, and over all heads at once",
)
OLMO3 = Family(
    name="OLMo 3",
    architectures=("Olmo3ForCausalLM",),
    model_type="olmo3",
    parse=parse3,
    golden={
        "olmo3": LOCAL,
        "olmo3-odd": {**LOCAL, **ODD},
        "olmo3-yarn": {**LOCAL, "rope_parameters": {"full_attention": YARN, SLIDING: PLAIN}},
    },
    differs="OLMo 2 with windows in three layers of four",
)
