"""Divides a model into the stages of a pipeline: contiguous ranges of its layers, the first with the embedding, the
last with the head.

Ranks are numbered from the last stage on, because rank 0 tells what was sampled. Those of a stage follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.model.shards.stage import Stage
from pagebus.actors.settings import Settings


def place_of(rank: int, tensor_parallel: int, stages: int) -> tuple[int, int]:
    """The stage of a rank, and its number among the ranks of that stage."""
    behind, within = divmod(rank, tensor_parallel)
    return stages - 1 - behind, within


def rank_config(config: ModelConfig, settings: Settings) -> ModelConfig:
    """The part of the model that the rank of these settings computes.

    Raises:
        ModelError: the model cannot be divided like this.
    """
    stages, tensor_parallel = settings.pipeline_parallel_size, settings.tensor_parallel_size
    stage, within = place_of(settings.rank, tensor_parallel, stages)
    local = local_config(config, within, tensor_parallel, by_expert=settings.enable_expert_parallel)
    return staged_config(local, stage, stages)


def staged_config(config: ModelConfig, index: int, count: int) -> ModelConfig:
    """The layers of one stage; the same configuration for a ``count`` of 1.

    Raises:
        ModelError: the model cannot be divided into stages.
    """
    if count == 1:
        return config
    spec, why = config.spec, ""
    if spec.encoder is not None or config.pooler is not None:
        why = "models that pool are not divided into stages"
    elif len(spec.layers) < count:
        why = f"a model of {len(spec.layers)} layers has fewer than that"
    if why:
        raise ModelError(f"--pipeline-parallel-size {count}: {why} ({config.architecture})")
    whole = spec if config.shard is None else config.shard.whole  # all ranks of a stage divide alike
    costs = [replace(whole, layers=(layer,)).layer_weights() for layer in whole.layers]
    layers = divide(costs, config.vocab_size * config.hidden_size, count)[index]
    return replace(
        config, spec=replace(spec, layers=spec.layers[layers.start : layers.stop]), num_layers=len(layers),
        stage=Stage(index, count, layers, config.tie_word_embeddings),
    )  # fmt: skip


def divide(costs: Sequence[int], last_cost: int, count: int) -> list[range]:
    """``count`` ranges of layers of these ``costs``, none of them empty, whose dearest is as cheap as can be; the last
    also bears ``last_cost``. Of equal ways, the one with the most layers in front."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    total = len(costs)
    # least[end]: the dearest stage, and the last one's start, of the first layers up to `end` in so many stages.
    least: list[list[tuple[int, int]]] = [[(sums[end], 0) for end in range(total + 1)]]
    for stage in range(1, count):
        more = last_cost if stage == count - 1 else 0
        row = [(0, 0)] * (total + 1)
        for end in range(stage + 1, total + 1):
            ways = ((max(least[-1][at][0], sums[end] - sums[at] + more), at) for at in range(stage, end))
            row[end] = min(ways, key=lambda way: (way[0], -way[1]))
        least.append(row)
    ranges, end = [], total
    for stage in reversed(range(count)):
        start = least[stage][end][1] if stage else 0
        ranges.append(range(start, end))
        end = start
    return ranges[::-1]
