"""GLM-4.5 and 4.6 with experts: half of each head turns, experts are chosen as in DeepSeek-V3."""

from __future__ import annotations

from pagebus.actors.model.families.experts.feeds import dense_first, sigmoids
from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope
from pagebus.actors.model.spec import Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec


def parse(fields: Fields) -> ModelSpec:
    """Dense layers first, ``first_k_dense_replace`` of them, then layers with experts."""
    head_dim = fields.head_dim()
    mixer = Gqa(
        fields.integer("num_attention_heads"), fields.kv_heads(), head_dim, head_dim**-0.5,
        bias=fields.flag("attention_bias"), qk_norm="head" if fields.flag("use_qk_norm") else "none",
    )  # fmt: skip
    feeds = dense_first(fields, sigmoids(fields), 1)
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=tuple(LayerSpec(mixer, feed) for feed in feeds),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(fields, head_dim, partial=0.5),),
    )


SMALL = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}  # fmt: skip
GROUPS = {**SMALL, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
ODD = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 48}
FAMILY = Family(
    name="GLM-4.5, 4.6",
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    parse=parse,
    names=NameMap(renamed=(("mlp.shared_experts.", "mlp.shared_expert."),)),
    defaults={"n_shared_experts": 1},
    golden={
        "glm4-moe": {**SMALL, "use_qk_norm": True, "attention_bias": True},
        "glm4-moe-odd": {**GROUPS, **ODD, "n_shared_experts": 2},
        "glm4-moe-groups": {**GROUPS, "first_k_dense_replace": 0, "norm_topk_prob": False, "tie_word_embeddings": True},
    },
    differs="half of each head turns; experts of the best groups, chosen with a bias, and a shared one",
)  # fmt: skip
