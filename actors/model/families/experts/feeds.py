"""Feed-forward parts in the words of DeepSeek, which GLM and Mistral 4 took over: dense layers first, then mixtures of
experts."""

from __future__ import annotations

from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.families.experts.fields import checked
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import Dense, Feed, Moe

ACTIVATIONS = {"silu": "silu"}


def dense(fields: Fields) -> Dense:
    """The part of layers without experts."""
    return Dense(fields.integer("intermediate_size"), fields.word("hidden_act", "silu", ACTIVATIONS))


def mixture(fields: Fields, **routing: Any) -> Moe:
    """The part of the others: experts, and those that all tokens share, as one."""
    if fields.get("moe_layer_freq", 1) != 1:
        raise ModelError(f"config.json: moe_layer_freq {fields.get('moe_layer_freq')} is not supported (only 1)")
    width = fields.integer("moe_intermediate_size")
    shared = Dense(fields.integer("n_shared_experts") * width) if fields.get("n_shared_experts") else None
    moe = Moe(
        fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok"), width,
        fields.word("hidden_act", "silu", ACTIVATIONS), shared=shared,
        factor=fields.number("routed_scaling_factor", 1.0), **routing,
    )  # fmt: skip
    return checked(moe)


def sigmoids(fields: Fields) -> Moe:
    """V3's choice of experts: sigmoids with a bias for the choice; groups are judged by the sum of their best two."""
    only(fields, "scoring_func", "sigmoid")
    only(fields, "topk_method", "noaux_tc")
    renormalise = bool(fields.get("norm_topk_prob", True))
    return mixture(
        fields, score="sigmoid", renormalise=renormalise, choice_bias=True, group_score="top2", **groups(fields)
    )


def only(fields: Fields, key: str, value: str) -> None:
    """Raises ModelError if the field says anything else than ``value``."""
    fields.word(key, value, {value: value})


def groups(fields: Fields) -> dict[str, int]:
    """How many groups of experts there are, and how many are kept; null means one."""
    found = {"groups": fields.integer("n_group", 1), "keep_groups": fields.integer("topk_group", 1)}
    experts, eligible = fields.integer("n_routed_experts"), found["keep_groups"]
    if experts % found["groups"] or eligible > found["groups"]:
        raise ModelError(f"config.json: {eligible} of n_group {found['groups']} groups of {experts} experts")
    if fields.integer("num_experts_per_tok") > experts // found["groups"] * eligible:
        raise ModelError("config.json: num_experts_per_tok is more than topk_group groups have experts")
    return found


def dense_first(fields: Fields, moe: Moe, default: int) -> tuple[Feed, ...]:
    """Each layer's part: ``first_k_dense_replace`` dense ones (0: none), then mixtures."""
    first, count = fields.count("first_k_dense_replace", default), fields.integer("num_hidden_layers")
    return tuple(dense(fields) if index < first else moe for index in range(count))
