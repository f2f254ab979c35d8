"""StarCoder2: layer norms with biases, feed-forward parts without a gate, biases in all products."""

from __future__ import annotations

from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def parse(fields: Fields) -> ModelSpec:
    """All layers alike, with one window or none."""
    head_dim, bias = fields.head_dim(), bool(fields.get("use_bias", True))
    window = 0 if fields.get("sliding_window") is None else fields.integer("sliding_window")
    mixer = Gqa(
        fields.integer("num_attention_heads"), fields.kv_heads(), head_dim, head_dim**-0.5, window,
        bias=bias, out_bias=bias,
    )  # fmt: skip
    act = fields.word("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS)
    feed = Dense(fields.integer("intermediate_size"), act, gated=False, bias=bias)
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=(LayerSpec(mixer, feed),) * fields.integer("num_hidden_layers"),
        norm=NormSpec("layer", fields.number("norm_epsilon", 1e-5), wide=True, bias=True),
        head=HeadSpec(tied=bool(fields.get("tie_word_embeddings", True))),
        rope=(parse_rope(fields, head_dim),),
    )


FAMILY = Family(
    name="StarCoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_type="starcoder2",
    parse=parse,
    names=NameMap(renamed=(("mlp.c_fc.", "mlp.up_proj."), ("mlp.c_proj.", "mlp.down_proj."))),
    golden={
        "starcoder2": {"sliding_window": 20},
        "starcoder2-odd": {
            "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "num_hidden_layers": 3,
            "hidden_act": "gelu",
        },
        "starcoder2-plain": {"use_bias": False, "tie_word_embeddings": True, "head_dim": 96, "sliding_window": 33},
    },
    differs="layer norms with biases, GELU without a gate, biases everywhere; perhaps a window",
)  # fmt: skip
