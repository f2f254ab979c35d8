"""The layers of a checkpoint that guess tokens after the next (multi-token prediction), as configurations."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.errors import ModelError

ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Those whose layers are known to be computed, and named, as DeepSeek's."""


def mtp_prefix(config: ModelConfig) -> str:
    """How the names of the first one begin: it is stored behind the model's layers."""
    return f"model.layers.{config.num_layers}"


def mtp_layer(config: ModelConfig) -> ModelConfig:
    """The first such layer of a model, as a model of that layer alone: it is like the model's last, and divided among
    ranks as that is.

    Raises:
        ModelError: the model has none, or one that is not served.
    """
    if not config.num_mtp_layers:
        raise ModelError("--spec-method mtp: the model has no such layers (config.json: num_nextn_predict_layers)")
    if config.architecture not in ARCHITECTURES:
        raise ModelError(f"--spec-method mtp: those of {config.architecture} are not served")
    layer = config.spec.layers[-1]
    head = replace(config.spec.head, tied=False)
    shard = config.shard
    if shard is not None:  # what is cut out of a tensor is found by the layer's number
        shard = replace(shard, whole=replace(shard.whole, layers=(*shard.whole.layers, shard.whole.layers[-1])))
    skipped = tuple(name for name in config.names.skip if not name.startswith(mtp_prefix(config) + "."))
    return replace(
        config,
        shard=shard,
        spec=replace(config.spec, layers=(layer,), head=head),
        names=replace(config.names, skip=skipped, only=f"{mtp_prefix(config)}."),
        num_layers=1,
        layer_windows=(layer.mixer.reach,),
        tie_word_embeddings=False,
        num_mtp_layers=0,
    )
