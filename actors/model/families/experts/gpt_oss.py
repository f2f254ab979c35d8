"""gpt-oss: a sink for each head, windows in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from pagebus.actors.model.families.experts.fields import checked, num_experts
from pagebus.actors.model.families.llama import ACTIVATIONS
from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields, every_nth
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Gqa, HeadSpec, LayerSpec, ModelSpec, Moe, NormSpec

WINDOW, LIMIT, ALPHA, BASE = 128, 7.0, 1.702, 150000.0
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Of files that do not speak of angles."""
RETURN, CALL = 200002, 200012
"""End tokens of its one tokenizer: ``<|return|>`` behind an answer, ``<|call|>`` behind a tool call."""


def parse(fields: Fields) -> ModelSpec:
    """Layers differ in their windows alone."""
    head_dim, bias = fields.head_dim(64), bool(fields.get("attention_bias", True))
    if not (fields.get("rope_parameters") or fields.get("rope_scaling")):
        fields = Fields({**fields.raw, "rope_parameters": YARN})
    window, count = fields.integer("sliding_window", WINDOW), fields.integer("num_hidden_layers")
    heads, kv_heads, scale = fields.integer("num_attention_heads"), fields.kv_heads(), head_dim**-0.5
    fields.word("hidden_act", "silu", ACTIVATIONS)
    moe = checked(
        Moe(
            num_experts(fields), fields.integer("num_experts_per_tok", 4), fields.integer("intermediate_size"),
            "swiglu_clamped", "softmax_of_top", router_bias=True, bias=True,
            limit=fields.number("swiglu_limit", LIMIT), alpha=fields.number("swiglu_alpha", ALPHA),
        )
    )  # fmt: skip
    seen = {"sliding_attention": window, "full_attention": 0}
    layers = (
        LayerSpec(Gqa(heads, kv_heads, head_dim, scale, seen[kind], sinks=True, bias=bias, out_bias=bias), moe)
        for kind in fields.layer_types(every_nth(count, 2))
    )
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=tuple(layers),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim, base=BASE),),
    )


STRETCHED = {**YARN, "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 64}
SMALL = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40, "rope_parameters": STRETCHED}
FAMILY = Family(
    name="gpt-oss (20b, 120b)",
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    parse=parse,
    names=NameMap(renamed=(("mlp.router.", "mlp.gate."),), columns_first=True, gates_by_turns=True),
    differs="sinks, a window in every second layer, biases everywhere, experts with a clamped gate",
    end_tokens=(RETURN, CALL),
    reasoning="openai_gptoss",
    golden={
        "gpt-oss": {**SMALL, "num_hidden_layers": 3, "sliding_window": 20},
        "gpt-oss-odd": {
            **SMALL, "hidden_size": 84, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 48,
            "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 36, "sliding_window": 33,
            "swiglu_limit": 0.8, "swiglu_alpha": 1.3,
        },
        "gpt-oss-wide": {
            **SMALL, "num_attention_heads": 16, "sliding_window": 21, "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
