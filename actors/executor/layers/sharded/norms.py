"""Norms of queries and of keys over all heads at once, of which a rank has some."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.model.shards.shard import Shard


@dataclass(frozen=True, slots=True)
class Widths:
    """Of the ``query`` and the ``key`` of all heads; ``counts_keys``: whether this rank's keys are not counted by
    another rank that holds them too."""

    query: int
    key: int
    counts_keys: bool


def widths_of(shard: Shard, layer: int) -> Widths:
    """Of a layer of the whole model."""
    mixer = shard.whole.layers[layer].mixer
    return Widths(mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, shard.is_first_holder(mixer))


def norm_widths(
    q: torch.Tensor, k: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], eps: float, whole: Widths, ops: Ops
) -> None:
    """Norm q [T, own] and k [T, own] in place, by the mean squares over all ranks. Rounds where
    :func:`pagebus.kernels.layers.norm.rms_norm` does."""
    squares = torch.stack([ops.row_squares(part) for part in (q, k)])
    if not whole.counts_keys:
        squares[1].zero_()
    means = ops.comm.all_reduce(squares)
    means[0] /= whole.query
    means[1] /= whole.key
    for part, weight, mean in zip((q, k), weights, means, strict=True):
        normed = part.float() * torch.rsqrt(mean + eps).unsqueeze(-1)
        part.copy_(weight * normed.to(weight.dtype))
