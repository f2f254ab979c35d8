"""Mixtral: Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families.experts.fields import checked, num_experts
from pagebus.actors.model.families.mistral import ODD, parse
from pagebus.actors.model.family import EXPERT_NAMES, Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec, Moe


def parse_mixture(fields: Fields) -> ModelSpec:
    """Mistral with experts, which are as wide as ``intermediate_size``."""
    spec = parse(fields)
    moe = checked(Moe(num_experts(fields), fields.integer("num_experts_per_tok"), fields.integer("intermediate_size")))
    return replace(spec, layers=tuple(replace(layer, feed=moe) for layer in spec.layers))


FAMILY = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    parse=parse_mixture,
    names=NameMap(renamed=(("block_sparse_moe.", "mlp."),), experts=EXPERT_NAMES[1]),
    defaults={"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
              "num_experts_per_tok": 2},
    golden={
        "mixtral": {"num_local_experts": 5},
        "mixtral-odd": {**ODD, "num_hidden_layers": 3, "num_experts_per_tok": 3, "intermediate_size": 40},
        "mixtral-window": {
            "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 19, "tie_word_embeddings": True,
        },
    },
    differs="Mistral with experts, by default without a window",
)  # fmt: skip
