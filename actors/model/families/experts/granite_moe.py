"""Granite 3 with experts, and with one beside them that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families import granite
from pagebus.actors.model.families.experts.fields import checked, num_experts
from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import Dense, ModelSpec, Moe


def parse(fields: Fields) -> ModelSpec:
    """All layers have experts, as wide as ``intermediate_size``; their weights are a softmax over the chosen."""
    spec = granite.parse(fields)
    width = fields.get("shared_intermediate_size") or 0
    shared = Dense(fields.integer("shared_intermediate_size")) if width else None
    moe = Moe(
        num_experts(fields), fields.integer("num_experts_per_tok"), fields.integer("intermediate_size"),
        score="softmax_of_top", shared=shared,
    )  # fmt: skip
    return replace(spec, layers=tuple(replace(layer, feed=checked(moe)) for layer in spec.layers))


NAMES = NameMap(
    renamed=(
        ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "mlp.experts.down_proj"),
        ("block_sparse_moe.router.layer.", "mlp.gate."),
        ("block_sparse_moe.router.", "mlp.gate."),
        ("block_sparse_moe.", "mlp."),
        ("shared_mlp.input_linear.", "mlp.shared_expert.gate_up_proj."),
        ("shared_mlp.output_linear.", "mlp.shared_expert.down_proj."),
    ),
    gate_up="gate_up_proj",
)
SMALL = {**granite.FACTORS, "intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 3}
ODD = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "num_local_experts": 7}
PLAIN = Family(
    name="Granite 3 MoE",
    architectures=("GraniteMoeForCausalLM",),
    model_type="granitemoe",
    parse=parse,
    names=NAMES,
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    golden={
        "granite-moe": SMALL,
        "granite-moe-odd": {**SMALL, **ODD, "num_hidden_layers": 3},
        "granite-moe-tied": {**SMALL, "num_experts_per_tok": 1, "attention_bias": True, "tie_word_embeddings": True},
    },
    differs="Granite 3 with experts, weighted by a softmax over the chosen",
)
SHARED = replace(
    PLAIN,
    name="Granite 3 MoE, shared",
    architectures=("GraniteMoeSharedForCausalLM",),
    model_type="granitemoeshared",
    golden={
        "granite-shared": {**SMALL, "shared_intermediate_size": 48},
        "granite-shared-odd": {**SMALL, **ODD, "shared_intermediate_size": 36},
        "granite-shared-none": {**SMALL, "shared_intermediate_size": 0, "tie_word_embeddings": True},
    },
    differs="the same, and an expert that all tokens share",
)
