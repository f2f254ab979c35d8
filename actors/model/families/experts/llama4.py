"""The text model of Llama 4: chunked attention beside layers that turn nothing, experts whose inputs are weighted."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.families.experts.fields import checked
from pagebus.actors.model.family import WITH_IMAGES, Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Dense, Gqa, HeadSpec, LayerSpec, ModelSpec, Moe, NormSpec, QueryScale

ACTIVATIONS = {"silu": "silu"}


def parse(fields: Fields) -> ModelSpec:
    """Layers that turn their heads norm them too and see their chunk; others see all, with a temperature."""
    head_dim, count, bias = fields.head_dim(128), fields.integer("num_hidden_layers"), fields.flag("attention_bias")
    scale = QueryScale(fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), shift=1)
    plain = Gqa(
        fields.integer("num_attention_heads"), fields.kv_heads(), head_dim, head_dim**-0.5, bias=bias, out_bias=bias,
        rope=None, position_scale=scale if fields.get("attn_temperature_tuning", True) else None,
    )  # fmt: skip
    turning = replace(plain, rope=0, position_scale=None, qk_norm="unit" if fields.get("use_qk_norm", True) else "none")
    step = fields.integer("no_rope_layer_interval", 4)
    given = fields.layer_flags("no_rope_layers") if fields.get("no_rope_layers") else None
    turns = given or tuple((index + 1) % step != 0 for index in range(count))
    default = tuple("chunked_attention" if each else "full_attention" for each in turns)
    kinds = fields.layer_types(default, ("full_attention", "chunked_attention"))
    chunk = fields.integer("attention_chunk_size") if fields.get("attention_chunk_size", 8192) else 0
    mixers = [
        replace(turning if each else plain, chunk=chunk if kind == "chunked_attention" else 0)
        for each, kind in zip(turns, kinds, strict=True)
    ]
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=tuple(map(LayerSpec, mixers, _feeds(fields, count))),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim, layout="pairs", base=5e5),),
    )


def _feeds(fields: Fields, count: int) -> list[Dense | Moe]:
    """Experts in each ``interleave_moe_layer_step``-th layer, or in ``moe_layers``."""
    act, width = fields.word("hidden_act", "silu", ACTIVATIONS), fields.integer("intermediate_size")
    moe = Moe(
        fields.integer("num_local_experts", 16), fields.integer("num_experts_per_tok", 1), width, act, "sigmoid",
        renormalise=False, weight_on_input=True, shared=Dense(width, act),
    )  # fmt: skip
    step, given = fields.integer("interleave_moe_layer_step", 1), fields.get("moe_layers")
    sparse = list(range(step - 1, count, step)) if given is None else given
    if not isinstance(sparse, list) or any(type(each) is not int for each in sparse):
        raise ModelError("config.json: moe_layers must be a list of layers")
    dense = Dense(fields.integer("intermediate_size_mlp", 16384), act)
    return [checked(moe) if index in sparse else dense for index in range(count)]


SMALL = {
    "num_hidden_layers": 4, "no_rope_layer_interval": 2, "attention_chunk_size": 24, "floor_scale": 32,
    "attn_scale": 0.4, "intermediate_size": 40, "intermediate_size_mlp": 72, "num_local_experts": 6,
}  # fmt: skip
SCOUT_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ODD = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 48}
FAMILY = Family(
    name="Llama 4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_type="llama4_text",
    parse=parse,
    names=replace(
        WITH_IMAGES, columns_first=True,
        renamed=(("feed_forward.router.", "mlp.gate."), ("feed_forward.", "mlp.")),
    ),
    golden={
        "llama4": {**SMALL, "rope_parameters": SCOUT_ROPE},
        "llama4-odd": {
            **SMALL, **ODD, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "attention_chunk_size": 37,
        },
        "llama4-plain": {
            **SMALL, "use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True,
            "tie_word_embeddings": True, "no_rope_layers": [1, 0, 0, 1],
        },
    },
    differs="chunked attention, every fourth layer sees all and turns nothing; experts of weighted inputs",
)  # fmt: skip
