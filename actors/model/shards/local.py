"""A model as one rank sees it: the same layers with fewer heads and smaller widths."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.oracle import ORACLE
from pagebus.actors.model.shards.shard import Shard
from pagebus.actors.model.spec import Dense, Feed, LayerSpec, Moe


def local_config(config: ModelConfig, rank: int, world: int, *, by_expert: bool = False) -> ModelConfig:
    """The part of ``rank`` of the model, ``shard`` saying of what; the same configuration for a ``world`` of 1.
    ``by_expert``: mixtures are divided into whole experts.

    Raises:
        ModelError: the model cannot be divided among so many ranks; the text names what is in the way.
    """
    if world == 1:
        return config
    check(config, world)
    shard = Shard(rank, world, config.spec, by_expert=by_expert)
    if config.architecture == ORACLE:  # it has no weights, and one head: each rank computes the hash
        return replace(config, shard=replace(shard, divides_layers=False))
    layers = tuple(_local_layer(layer, shard) for layer in config.spec.layers)
    mixer, feed = layers[0].mixer, layers[0].feed
    return replace(
        config, shard=shard, spec=replace(config.spec, layers=layers), num_heads=mixer.heads,
        num_kv_heads=mixer.kv_heads, intermediate_size=feed.width,
    )  # fmt: skip


def whole_config(config: ModelConfig) -> ModelConfig:
    """The model of which ``config`` is a rank's part; the same configuration if it is of no rank."""
    if config.shard is None:
        return config
    whole = config.shard.whole
    mixer, feed = whole.layers[0].mixer, whole.layers[0].feed
    return replace(
        config, shard=None, spec=whole, num_heads=mixer.heads, num_kv_heads=mixer.kv_heads,
        intermediate_size=feed.width,
    )  # fmt: skip


def check(config: ModelConfig, world: int) -> None:
    """Raises ModelError for what is not divided among ranks."""
    why = ""
    if config.spec.encoder is not None:
        why = "encoders are not divided among ranks"
    elif config.pooler is not None and config.pooler.between is not None:
        why = "a classifier made of two rows of the head is not divided among ranks"
    elif config.vocab_size < world:
        why = f"a vocabulary of {config.vocab_size} tokens is smaller than that"
    if why:
        raise ModelError(f"--tensor-parallel-size {world}: {why} ({config.architecture})")


def _local_layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    mixer = layer.mixer
    local = replace(mixer, heads=len(shard.heads(mixer)), kv_heads=len(shard.kv_heads(mixer)))
    return replace(layer, mixer=local, feed=_local_feed(layer.feed, shard))


def _local_feed(feed: Feed, shard: Shard) -> Feed:
    if isinstance(feed, Moe) and shard.by_expert:
        return replace(_with_local_shared(feed, shard), own=_own_experts(feed, shard))
    if feed.width < shard.world:
        raise ModelError(f"--tensor-parallel-size {shard.world}: a feed-forward part is only {feed.width} wide")
    width = len(shard.of(feed.width))
    if isinstance(feed, Dense):
        return replace(feed, width=width)
    return replace(_with_local_shared(feed, shard), width=width)


def _own_experts(feed: Moe, shard: Shard) -> range:
    if feed.experts < shard.world:
        raise ModelError(
            f"--tensor-parallel-size {shard.world}: --enable-expert-parallel: there are only {feed.experts} experts"
        )
    return shard.of(feed.experts)


def _with_local_shared(feed: Moe, shard: Shard) -> Moe:
    """The expert that all tokens share is divided by its width in any case."""
    return replace(feed, shared=None if feed.shared is None else _local_dense(feed.shared, shard))


def _local_dense(feed: Dense, shard: Shard) -> Dense:
    local = _local_feed(feed, shard)
    assert not isinstance(local, Moe)
    return local
