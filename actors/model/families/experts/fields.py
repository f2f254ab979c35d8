"""What ``config.json`` says of a mixture of experts, in the words that several families share."""

from __future__ import annotations

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import Moe


def num_experts(fields: Fields) -> int:
    """By either name: transformers 5 writes ``num_local_experts`` where the hub has ``num_experts``, or the reverse."""
    local = fields.get("num_experts") is None and fields.get("num_local_experts") is not None
    return fields.integer("num_local_experts" if local else "num_experts")


def checked(moe: Moe) -> Moe:
    """The same. Raises ModelError for more choices than experts."""
    if moe.top_k > moe.experts:
        raise ModelError(f"config.json: num_experts_per_tok {moe.top_k} is more than there are experts, {moe.experts}")
    return moe


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have experts: each ``decoder_sparse_step``-th, but those of ``mlp_only_layers``."""
    dense, step = fields.get("mlp_only_layers") or [], fields.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        raise ModelError("config.json: mlp_only_layers must be a list of layers")
    count = fields.integer("num_hidden_layers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))
