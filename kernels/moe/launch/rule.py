"""The rule for launch shapes of experts: what the cost model is held against, and what decides in float32."""

from __future__ import annotations

from functools import cache

import torch

from pagebus.kernels.common.target import HOPPER, Target
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.moe.launch.shapes import (
    LONG_ITEM,
    Config,
    GroupConfig,
    Grouped,
    PairConfig,
    Shape,
    Specialized,
    Unsorted,
    item_size,
    leaves_unsorted,
)
from pagebus.kernels.specialized.hopper_gemm import TOKENS, SpecializedConfig


def by_rule(num_tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Config:
    """The launch shapes for so many tokens."""
    pairs = num_tokens * shape.top_k
    if leaves_unsorted(pairs, shape):
        return _unsorted(shape, dtype)
    return _sorted(item_size(-(-pairs // shape.experts)), shape, dtype, target)


def choose_invariant(num_tokens: int, shape: Shape, dtype: torch.dtype) -> Grouped:
    """Launch shapes with which a token's result does not depend on others: each sum is one chain along K, whatever the
    width of its tile; tiles of 64 rows and more take the same matrix instructions."""
    tokens = item_size(-(-num_tokens * shape.top_k // shape.experts))
    if dtype.itemsize > 2:
        both = GroupConfig(64, 32, 2, 8)
    else:
        both = GroupConfig(64, 64, 4, 4) if tokens <= 64 else GroupConfig(64, 64, 3, 8)
    return Grouped(tokens, both, both)


@cache
def _unsorted(shape: Shape, dtype: torch.dtype) -> Unsorted:
    if dtype.itemsize > 2:
        return Unsorted(PairConfig(4, 256, 4), PairConfig(4, 256, 4))
    return Unsorted(PairConfig(2, 256, 2, 1), PairConfig(4, min(1024, next_power_of_2(shape.width)), 8, 4))


@cache
def _sorted(tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Grouped | Specialized:
    if dtype.itemsize > 2:
        both = GroupConfig(32, 32, 2, 4)
        return Grouped(min(64, tokens), both, both)
    tma = shape.is_aligned and target is not None and target.capability == HOPPER
    deep = 128 if tokens <= 32 and shape.hidden % 128 == 0 else 64
    if tokens == LONG_ITEM == TOKENS and tma and shape.is_whole:
        return Specialized(tokens, SpecializedConfig(256), SpecializedConfig(256))
    if tokens == LONG_ITEM:
        return Grouped(tokens, GroupConfig(64, 64, 3, 8, tma), GroupConfig(128, 64, 3, 8, tma))
    gate_up = GroupConfig(64, deep, 3 if deep == 128 else 4, 4, tma)
    return Grouped(tokens, gate_up, GroupConfig(64, deep if shape.width % 128 == 0 else 64, 3, 4, tma))
