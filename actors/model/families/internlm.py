"""InternLM2, whose queries, keys and values are one tensor sorted by key head, and InternLM3: Llama with biases."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families import llama
from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec


def parse2(fields: Fields) -> ModelSpec:
    """``bias`` is one of all products of attention."""
    return llama.parse(Fields({**fields.raw, "attention_bias": fields.flag("bias"), "mlp_bias": False}))


def parse3(fields: Fields) -> ModelSpec:
    """``qkv_bias``, and ``bias`` of all other products; transformers writes them under Llama's names."""
    into = fields.flag("qkv_bias") or fields.flag("attention_bias")
    out = fields.flag("bias") or fields.flag("mlp_bias")
    spec = llama.parse(Fields({**fields.raw, "attention_bias": into, "mlp_bias": out}))
    layer = replace(spec.layers[0], mixer=replace(spec.layers[0].mixer, out_bias=out))
    return replace(spec, layers=(layer,) * len(spec.layers))


ODD = {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0}
INTERNLM2 = Family(
    name="InternLM2, 2.5",
    architectures=("InternLM2ForCausalLM",),
    model_type="internlm2",
    parse=parse2,
    names=NameMap(
        renamed=(
            ("model.tok_embeddings.", "model.embed_tokens."),
            ("attention.wqkv.", "self_attn.wqkv."),
            ("attention.wo.", "self_attn.o_proj."),
            ("attention_norm.", "input_layernorm."),
            ("ffn_norm.", "post_attention_layernorm."),
            ("feed_forward.w1.", "mlp.gate_proj."),
            ("feed_forward.w3.", "mlp.up_proj."),
            ("feed_forward.w2.", "mlp.down_proj."),
            ("output.weight", "lm_head.weight"),
        ),
        qkv="wqkv",
        qkv_by_head=True,
    ),
    golden={
        "internlm2": {"head_dim": 16, "rope_parameters": DYNAMIC},
        "internlm2-odd": ODD,
        "internlm2-biased": {**ODD, "bias": True, "num_key_value_heads": 7, "num_hidden_layers": 3},
    },
    differs="queries, keys and values in one tensor, sorted by key head",
)
INTERNLM3 = Family(
    name="InternLM3",
    architectures=("InternLM3ForCausalLM",),
    model_type="internlm3",
    parse=parse3,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    golden={
        "internlm3": {"rope_parameters": DYNAMIC, "head_dim": 32},
        "internlm3-odd": {**ODD, "head_dim": 48},
        "internlm3-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    },
    differs="perhaps biases of all products",
)
