"""From the states of a step to the numbers of the parts of prompts that it pools."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.pooling.head import PooledHead
from pagebus.actors.model.config import ModelConfig


def pools_all_tokens(config: ModelConfig) -> bool:
    """Whether the model only pools, and others than the last tokens of prompts: its steps need the states of all."""
    return config.pooler is not None and config.pooler.pooling != "last"


def numbers_of_parts(
    states: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor, head: PooledHead | None, ops: Ops
) -> torch.Tensor:
    """states [T, H] -> [p, numbers] float32: sums over ``counts`` [p] states from ``firsts`` [p] on. A ``head`` is
    applied to the mean, and told as often as there are tokens. Empty parts give numbers that mean nothing."""
    sums = ops.sum_parts(states, firsts, counts)
    if head is None:
        return sums
    lengths = counts.clamp(min=1).unsqueeze(1)
    return head(sums / lengths) * lengths
