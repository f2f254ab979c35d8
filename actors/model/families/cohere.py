"""Command R, R+ and A, and R7B: one layer norm for both parts of a layer, heads that turn by neighbours."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families import llama
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields, every_nth
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import HeadSpec, LayerSpec, ModelSpec, NormSpec

SCALE = 0.0625


def parse1(fields: Fields) -> ModelSpec:
    """All layers alike."""
    fields.refuse("use_qk_norm", "layer norms of heads")
    spec, head_dim = llama.parse(fields), fields.head_dim()
    layer = LayerSpec(spec.layers[0].mixer, spec.layers[0].feed, "shared")
    return replace(
        spec,
        layers=(layer,) * len(spec.layers),
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-5), wide=True),
        head=HeadSpec(bool(fields.get("tie_word_embeddings", True)), scale=fields.number("logit_scale", SCALE)),
        rope=(parse_rope(fields, head_dim, layout="pairs"),),
    )


def parse2(fields: Fields) -> ModelSpec:
    """Three layers in four turn their heads and have a window; the others do neither."""
    spec, step = parse1(fields), fields.integer("sliding_window_pattern", 4)
    window, layer = fields.integer("sliding_window", 4096), spec.layers[0]
    local = replace(layer, mixer=replace(layer.mixer, window=window))
    full = replace(layer, mixer=replace(layer.mixer, rope=None))
    types = fields.layer_types(every_nth(len(spec.layers), step))
    return replace(spec, layers=tuple(local if kind == "sliding_attention" else full for kind in types))


ODD = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16}
PLAIN = {"head_dim": 16, "logit_scale": 0.25, "num_key_value_heads": 2}
LOCAL = {"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 2}
COHERE = Family(
    name="Command R, R+ (without norms of heads)",
    architectures=("CohereForCausalLM",),
    model_type="cohere",
    parse=parse1,
    golden={
        "cohere": PLAIN, "cohere-odd": {**ODD, "logit_scale": 0.5},
        "cohere-biased": {**PLAIN, "attention_bias": True, "num_attention_heads": 4},
    },
    differs="one layer norm for both parts, which add at once; heads turn by neighbours",
)  # fmt: skip
COHERE2 = Family(
    name="Command R7B, A",
    architectures=("Cohere2ForCausalLM",),
    model_type="cohere2",
    parse=parse2,
    golden={
        "cohere2": {**LOCAL, "head_dim": 64}, "cohere2-odd": {**LOCAL, **ODD},
        "cohere2-biased": {**LOCAL, **ODD, "attention_bias": True, "sliding_window": 33},
    },
    differs="the same; three layers in four have a window, the others turn nothing",
)  # fmt: skip
