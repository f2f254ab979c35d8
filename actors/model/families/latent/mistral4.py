"""Mistral 4: latents as DeepSeek V3 has them, a softmax over experts, queries that grow as those of Ministral 3."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.families.experts.feeds import dense_first, groups, mixture, only
from pagebus.actors.model.families.latent.golden import GROUPS, ODD, QUERIES, SMALL, YARN
from pagebus.actors.model.families.latent.parts import NAMES, decoder, layout_of
from pagebus.actors.model.families.mistral import query_scale
from pagebus.actors.model.family import IMAGES, TOWERS, Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec


def parse(fields: Fields) -> ModelSpec:
    """Groups are judged by the sum of their best two."""
    only(fields, "scoring_func", "softmax")
    renormalise = bool(fields.get("norm_topk_prob", True))
    moe = mixture(fields, renormalise=renormalise, group_score="top2", **groups(fields))
    spec, scale = decoder(fields, dense_first(fields, moe, 0), layout_of(fields)), query_scale(fields)
    layers = (replace(layer, mixer=replace(layer.mixer, position_scale=scale)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MISTRAL4 = Family(
    name="Mistral 4",
    differs="latents hold keys and values; queries grow as those of Ministral; a softmax over experts",
    architectures=("Mistral4ForCausalLM",),
    model_type="mistral4",
    parse=parse,
    names=replace(NAMES, prefixes=TOWERS, skip=IMAGES),
    defaults={
        "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 4,
        "first_k_dense_replace": 0, "norm_topk_prob": True, "intermediate_size": 12288, "num_attention_heads": 32,
    },
    golden={
        "mistral4": {**SMALL, "head_dim": 24, "q_lora_rank": 24, "first_k_dense_replace": 0,
                     "rope_parameters": GROWING},
        "mistral4-odd": {**SMALL, **ODD, **QUERIES, "head_dim": 36, "rope_parameters": {**GROWING, "factor": 8.0}},
        "mistral4-groups": {**SMALL, **GROUPS, "head_dim": 24, "rope_interleave": False, "norm_topk_prob": False,
                            "rope_parameters": GROWING, "tie_word_embeddings": True},
    },
)  # fmt: skip
