"""GLM-4.7-Flash: as DeepSeek V3, with one group of experts."""

from __future__ import annotations

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.families.experts.feeds import dense, dense_first, sigmoids
from pagebus.actors.model.families.latent.golden import GROUPS, ODD, QUERIES, SMALL
from pagebus.actors.model.families.latent.parts import NAMES, decoder, layout_of
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec

LAYER_FEEDS = ("dense", "sparse")


def parse(fields: Fields) -> ModelSpec:
    """As V3; layers may be listed in ``mlp_layer_types``."""
    kinds, moe, count = fields.get("mlp_layer_types"), sigmoids(fields), fields.integer("num_hidden_layers")
    if kinds is None:
        return decoder(fields, dense_first(fields, moe, 1), layout_of(fields))
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in LAYER_FEEDS for kind in kinds):
        raise ModelError(f"config.json: mlp_layer_types must list {count} times {' or '.join(LAYER_FEEDS)}")
    return decoder(fields, [moe if kind == "sparse" else dense(fields) for kind in kinds], layout_of(fields))


FAMILY = Family(
    name="GLM-4.7-Flash",
    differs="as DeepSeek V3, with one group",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    parse=parse,
    names=NAMES,
    defaults={
        "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8, "norm_topk_prob": True, "intermediate_size": 10240, "rms_norm_eps": 1e-5,
        "num_attention_heads": 20,
    },
    golden={
        "glm4-moe-lite": {**SMALL, "q_lora_rank": 24, "v_head_dim": 32, "qk_nope_head_dim": 24},
        "glm4-moe-lite-odd": {**SMALL, **ODD, **QUERIES, "num_hidden_layers": 4,
                              "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
        "glm4-moe-lite-groups": {**SMALL, **GROUPS, "rope_interleave": False, "tie_word_embeddings": True},
    },
)  # fmt: skip
