"""Qwen 2, 2.5 and 3, dense."""

from __future__ import annotations

from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec, QkNorm

ACTIVATIONS = {"silu": "silu"}
HEAD_DIM = 128
"""Of Qwen 3's files that leave it out."""


def parse2(fields: Fields) -> ModelSpec:
    """Biases on queries, keys and values, always."""
    return _parse(fields, fields.head_dim(), bias=True, out_bias=False, qk_norm="none")


def parse3(fields: Fields) -> ModelSpec:
    """Norms of each head's query and key."""
    bias = fields.flag("attention_bias")
    return _parse(fields, fields.head_dim(HEAD_DIM), bias=bias, out_bias=bias, qk_norm="head")


def _parse(fields: Fields, head_dim: int, *, bias: bool, out_bias: bool, qk_norm: QkNorm) -> ModelSpec:
    feed = Dense(fields.integer("intermediate_size"), fields.word("hidden_act", "silu", ACTIVATIONS))
    heads, kv_heads, scale = fields.integer("num_attention_heads"), fields.kv_heads(), head_dim**-0.5
    layers = tuple(
        LayerSpec(Gqa(heads, kv_heads, head_dim, scale, window, qk_norm=qk_norm, bias=bias, out_bias=out_bias), feed)
        for window in qwen_windows(fields)
    )
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=layers,
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim),),
    )


def qwen_windows(fields: Fields) -> tuple[int, ...]:
    """Of each layer, 0 for none: by type, or from ``max_window_layers`` on."""
    count, first = fields.integer("num_hidden_layers"), fields.count("max_window_layers", 28)
    window = qwen_window(fields)
    default = tuple("sliding_attention" if index >= first else "full_attention" for index in range(count))
    return tuple(window if kind == "sliding_attention" else 0 for kind in fields.layer_types(default))


def qwen_window(fields: Fields) -> int:
    """Of layers that have one: with ``use_sliding_window`` only; 0: none."""
    windowed = fields.flag("use_sliding_window") and fields.get("sliding_window", 4096) is not None
    return fields.integer("sliding_window", 4096) if windowed else 0


WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
ODD = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64}
QWEN2 = Family(
    name="Qwen 2, 2.5",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    parse=parse2,
    golden={"qwen2": WINDOWS, "qwen2-odd": ODD, "qwen2-tied": {"head_dim": 128, "tie_word_embeddings": True}},
    differs="biases on queries, keys and values",
)
QWEN3 = Family(
    name="Qwen 3",
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    parse=parse3,
    golden={"qwen3": WINDOWS, "qwen3-odd": ODD, "qwen3-tied": {"attention_bias": True, "tie_word_embeddings": True}},
    differs="each head's query and key are normed",
)
