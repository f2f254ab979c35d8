"""Gemma 1, 2 and 3; of Gemma 3 also the text tower of its checkpoints with images."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families.gemma_golden import GEMMA1_GOLDEN, GEMMA2_GOLDEN, GEMMA3_DEFAULTS, GEMMA3_GOLDEN
from pagebus.actors.model.family import WITH_IMAGES, Family
from pagebus.actors.model.fields import Fields, every_nth
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, NormPlaces, NormSpec, RopeSpec

TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}
"""Files of Gemma 1 that say ``gelu`` mean this too."""
SLIDING = "sliding_attention"


def parse1(fields: Fields) -> ModelSpec:
    """Llama with norms of 1 + w, a scaled embedding and another activation."""
    head_dim = fields.head_dim(256)
    mixer = Gqa(fields.integer("num_attention_heads"), fields.kv_heads(), head_dim, head_dim**-0.5)
    mixers = (mixer,) * fields.integer("num_hidden_layers")
    return _spec(fields, "hidden_act", mixers, "pre", (parse_rope(fields, head_dim),))


def parse2(fields: Fields) -> ModelSpec:
    """Norms around both parts, every second layer with a window, soft caps."""
    ropes = (parse_rope(fields, fields.head_dim(256)),)
    return _sandwich(fields, fields.layer_types(tuple(every_nth(fields.integer("num_hidden_layers"), 2))), ropes)


def parse3(fields: Fields) -> ModelSpec:
    """The same with norms of heads, five layers in six with a window, and angles of their own for these."""
    step, count = fields.integer("sliding_window_pattern", 6), fields.integer("num_hidden_layers")
    fields.refuse("use_bidirectional_attention", "attention to later tokens")
    head_dim = fields.head_dim(256)
    local_base = fields.number("rope_local_base_freq", 10000.0)
    if isinstance((fields.get("rope_parameters") or {}).get(SLIDING), dict):
        ropes = tuple(
            parse_rope(fields, head_dim, kind=kind, base=base)
            for kind, base in (("full_attention", 1e6), (SLIDING, local_base))
        )
    else:
        ropes = (parse_rope(fields, head_dim, base=1e6), RopeSpec(head_dim, local_base))
    # Positions in its files are those that the angles have been stretched to.
    ropes = tuple(replace(rope, original=int(rope.original / rope.factor)) for rope in ropes)
    return _sandwich(fields, fields.layer_types(every_nth(count, step)), ropes, normed_heads=True)


def _sandwich(
    fields: Fields, types: tuple[str, ...], ropes: tuple[RopeSpec, ...], *, normed_heads: bool = False
) -> ModelSpec:
    heads, kv_heads, head_dim = fields.integer("num_attention_heads"), fields.kv_heads(), fields.head_dim(256)
    window, bias = fields.integer("sliding_window", 4096), fields.flag("attention_bias")
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    cap = 0.0 if fields.get("attn_logit_softcapping") is None else fields.number("attn_logit_softcapping")
    mixers = tuple(
        Gqa(
            heads, kv_heads, head_dim, scale, window if kind == SLIDING else 0, bias=bias, out_bias=bias, softcap=cap,
            rope=len(ropes) - 1 if kind == SLIDING else 0, qk_norm="head" if normed_heads else "none",
        )
        for kind in types
    )  # fmt: skip
    return _spec(fields, "hidden_activation", mixers, "sandwich", ropes)


def _spec(
    fields: Fields, act: str, mixers: tuple[Gqa, ...], norms: NormPlaces, ropes: tuple[RopeSpec, ...]
) -> ModelSpec:
    feed = Dense(fields.integer("intermediate_size"), fields.word(act, "gelu_pytorch_tanh", TANH))
    hidden = fields.integer("hidden_size")
    cap = 0.0 if fields.get("final_logit_softcapping") is None else fields.number("final_logit_softcapping")
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1)
    layers = tuple(LayerSpec(mixer, feed, norms) for mixer in mixers)
    tied = bool(fields.get("tie_word_embeddings", True))
    return ModelSpec(
        fields.integer("vocab_size"), hidden, layers, norm, HeadSpec(tied, softcap=cap), ropes, hidden**0.5
    )


GEMMA1 = Family(
    "Gemma", ("GemmaForCausalLM",), "gemma", parse1, golden=GEMMA1_GOLDEN,
    differs="norms of 1 + w, GELU, a scaled embedding, heads of 256",
)  # fmt: skip
GEMMA2 = Family(
    "Gemma 2", ("Gemma2ForCausalLM",), "gemma2", parse2, golden=GEMMA2_GOLDEN,
    defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    differs="norms also behind both parts, a window in every second layer, soft caps",
)  # fmt: skip
GEMMA3 = Family(
    "Gemma 3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), "gemma3_text", parse3,
    names=WITH_IMAGES, defaults=GEMMA3_DEFAULTS, golden=GEMMA3_GOLDEN,
    differs="five layers in six with a window and angles of their own; normed heads",
)  # fmt: skip
