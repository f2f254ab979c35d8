"""What the families with latent attention say in the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.family import NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.ropes import parse_rope, rope_fields
from pagebus.actors.model.spec import Feed, HeadSpec, LayerSpec, Mla, ModelSpec, NormSpec, RopeLayout

NAMES = NameMap(renamed=(("mlp.shared_experts.", "mlp.shared_expert."),))


def decoder(fields: Fields, feeds: Sequence[Feed], layout: RopeLayout) -> ModelSpec:
    """All layers attend alike; layer i has ``feeds[i]``."""
    mixer = _mixer(fields)
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=tuple(LayerSpec(mixer, feed) for feed in feeds),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6)),
        head=HeadSpec(tied=fields.flag("tie_word_embeddings")),
        rope=(parse_rope(_whole(fields), mixer.rope_dim, layout=layout),),
    )


def _mixer(fields: Fields) -> Mla:
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelError(f"config.json: qk_rope_head_dim {rope_dim} is odd, rotary embeddings need pairs")
    biased = fields.flag("attention_bias")
    rank = fields.integer("kv_lora_rank")
    return Mla(
        heads=fields.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=rank + rope_dim,
        kv_rank=rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * _stretch(fields) ** 2,
        q_rank=0 if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        bias=biased,
        out_bias=biased,
    )


def layout_of(fields: Fields) -> RopeLayout:
    """Neighbours turn together, unless the file says otherwise."""
    return "pairs" if fields.get("rope_interleave", True) else "half"


def _stretch(fields: Fields) -> float:
    """By what queries and keys grow where positions are stretched."""
    said = Fields(rope_fields(fields))
    if said.get("rope_type", said.get("type", "default")) == "default" or not said.get("mscale_all_dim"):
        return 1.0
    factor = said.number("factor")
    return 1.0 if factor <= 1 else 0.1 * said.number("mscale_all_dim") * math.log(factor) + 1.0


def _whole(fields: Fields) -> Fields:
    """Without ``partial_rotary_factor`` where it says what the two sizes of a query's parts say."""
    said, rope_dim = rope_fields(fields), fields.integer("qk_rope_head_dim")
    share = said.pop("partial_rotary_factor", fields.get("partial_rotary_factor"))
    whole = fields.integer("qk_nope_head_dim") + rope_dim
    if share not in (None, 1) and round(share * whole) != rope_dim:
        raise ModelError(f"config.json: partial_rotary_factor {share} of {whole} is not qk_rope_head_dim {rope_dim}")
    rest = {key: value for key, value in fields.raw.items() if key not in ("partial_rotary_factor", "rope_scaling")}
    return Fields({**rest, "rope_parameters": said})
