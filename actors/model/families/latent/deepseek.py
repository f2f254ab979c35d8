"""DeepSeek V2, V2-Lite, V3 and R1, and Kimi K2, which is a V3."""

from __future__ import annotations

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.families.experts.feeds import dense_first, groups, mixture, only, sigmoids
from pagebus.actors.model.families.latent.golden import GROUPS, ODD, QUERIES, SMALL, YARN
from pagebus.actors.model.families.latent.parts import NAMES, decoder, layout_of
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec

METHODS = {"greedy": False, "group_limited_greedy": True}


def parse2(fields: Fields) -> ModelSpec:
    """A softmax, whose weights are not renormalised; groups are judged by their best expert, if there are groups."""
    only(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob"):
        raise ModelError("config.json: norm_topk_prob is not supported (DeepSeek V2 has it false)")
    grouped = fields.word("topk_method", "greedy", METHODS)
    moe = mixture(fields, renormalise=False, **(groups(fields) if grouped else {}))
    return decoder(fields, dense_first(fields, moe, 0), "pairs")


def parse3(fields: Fields) -> ModelSpec:
    """V3's choice of experts."""
    return decoder(fields, dense_first(fields, sigmoids(fields), 3), layout_of(fields))


DEEPSEEK2 = Family(
    name="DeepSeek V2, V2-Lite",
    differs="experts behind dense layers, some of them shared; latents hold keys and values; V2 has groups of experts",
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    parse=parse2,
    names=NAMES,
    defaults={
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
    },
    golden={
        "deepseek-v2-lite": {**SMALL, "rope_parameters": YARN},
        "deepseek-v2": {**SMALL, **GROUPS, **QUERIES, "topk_method": "group_limited_greedy",
                        "routed_scaling_factor": 2.5},
        "deepseek-v2-odd": {**SMALL, **ODD, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    },
)  # fmt: skip
DEEPSEEK3 = Family(
    name="DeepSeek V3, R1, Kimi K2",
    differs="the same; sigmoids with a bias choose groups and experts",
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    parse=parse3,
    names=NAMES,
    defaults={
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "intermediate_size": 18432, "num_attention_heads": 128,
    },
    golden={
        "deepseek-v3": {**SMALL, **GROUPS, "q_lora_rank": 24, "rope_parameters": {**YARN, "mscale": 1.0,
                        "mscale_all_dim": 1.0}},
        "kimi-k2": {**SMALL, "q_lora_rank": 32, "n_shared_experts": 1, "routed_scaling_factor": 2.827},
        "deepseek-v3-odd": {**SMALL, **ODD, **QUERIES, "first_k_dense_replace": 0, "rope_interleave": False,
                            "norm_topk_prob": False, "tie_word_embeddings": True},
    },
)  # fmt: skip
