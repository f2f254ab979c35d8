"""Which kernels multiply how many tokens with their experts, and with which launch shapes."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from math import ceil, sqrt
from typing import NamedTuple

import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.moe.coded import CodedConfig
from pagebus.kernels.moe.grouped import GroupConfig
from pagebus.kernels.moe.pairs import PairConfig
from pagebus.kernels.moe.routing import WIDE_GRID
from pagebus.kernels.moe.sorting import FEW_PAIRS, MOST_PAIRS
from pagebus.kernels.specialized.hopper_gemm import DEPTH, TOKENS, SpecializedConfig

MOST_UNSORTED = 32
"""Pairs of a token and an expert that are not sorted, at most."""
LONG_ITEM = 128
"""Pairs of an item, at most."""


class Shape(NamedTuple):
    """E experts of ``width`` I over ``hidden`` H, of which each token gets ``top_k``."""

    experts: int
    top_k: int
    hidden: int
    width: int


class Unsorted(NamedTuple):
    """Launch shapes of the kernels for pairs as they come."""

    gate_up: PairConfig
    down: PairConfig


class Grouped(NamedTuple):
    """Launch shapes of the kernels for sorted pairs, in items of ``tokens``."""

    tokens: int
    gate_up: GroupConfig
    down: GroupConfig


class Specialized(NamedTuple):
    """Launch shapes of Hopper's kernel for many sorted pairs, in items of ``tokens``."""

    tokens: int
    gate_up: SpecializedConfig
    down: SpecializedConfig


Config = Unsorted | Grouped | Specialized


def choose(num_tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Config:
    """The launch shapes for so many tokens."""
    pairs = num_tokens * shape.top_k
    if leaves_unsorted(pairs, shape):
        return _unsorted(shape, dtype, target)
    return _grouped(item_size(-(-pairs // shape.experts)), shape, dtype, target)


def choose_invariant(num_tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Grouped:
    """The same with which a token's result does not depend on others: each sum is one chain along K, whatever the width
    of its tile; tiles of 64 rows and more take the same matrix instructions."""
    tokens = item_size(-(-num_tokens * shape.top_k // shape.experts))
    if dtype.itemsize > 2:
        both = GroupConfig(64, 32, 2, 8)
    else:
        both = GroupConfig(64, 64, 4, 4) if tokens <= 64 else GroupConfig(64, 64, 3, 8)
    return Grouped(tokens, both, both)


def leaves_unsorted(num_pairs: int, shape: Shape) -> bool:
    """Whether so few pairs have hardly an expert in common: those of one token have none, and each would read the
    weights of its expert anew."""
    return num_pairs <= min(MOST_UNSORTED, max(shape.top_k, shape.experts // 4))


def item_size(mean: int) -> int:
    """Pairs of an item, if experts have so many on average: few experts have more, which would be read twice."""
    if mean < LONG_ITEM // 2:
        mean += ceil(2 * sqrt(mean))
    return min(LONG_ITEM, max(16, next_power_of_2(mean)))


@cache
def _unsorted(shape: Shape, dtype: torch.dtype, target: Target | None) -> Unsorted:
    if dtype.itemsize > 2:
        return Unsorted(PairConfig(4, 256, 4), PairConfig(4, 256, 4))
    return Unsorted(PairConfig(2, 256, 2, 1), PairConfig(4, min(1024, next_power_of_2(shape.width)), 8, 4))


@cache
def _grouped(tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Grouped | Specialized:
    if dtype.itemsize > 2:
        both = GroupConfig(32, 32, 2, 4)
        return Grouped(min(64, tokens), both, both)
    aligned = shape.hidden % 8 == 0 and shape.width % 8 == 0  # rows of whole 16 bytes
    tma = aligned and target is not None and target.capability == 90
    deep = 128 if tokens <= 32 and shape.hidden % 128 == 0 else 64
    if tokens == LONG_ITEM == TOKENS and tma and shape.hidden % DEPTH == shape.width % DEPTH == 0:
        return Specialized(tokens, SpecializedConfig(256), SpecializedConfig(256))
    if tokens == LONG_ITEM:
        return Grouped(tokens, GroupConfig(64, 64, 3, 8, tma), GroupConfig(128, 64, 3, 8, tma))
    gate_up = GroupConfig(64, deep, 3 if deep == 128 else 4, 4, tma)
    return Grouped(tokens, gate_up, GroupConfig(64, deep if shape.width % 128 == 0 else 64, 3, 4, tma))


class ExpertsKernel(StrEnum):
    """The kernels that multiply tokens with their experts. Quantized ones are read by `CODED`, or dequantized where it
    cannot read them."""

    PAIRS = "moe_pairs"
    GROUPED = "moe_grouped"
    SPECIALIZED = "moe_specialized"
    CODED = "moe_coded"
    DEQUANTIZED = "moe_dequantized"
    TORCH = "torch"


KERNELS = {
    Unsorted: ExpertsKernel.PAIRS,
    Grouped: ExpertsKernel.GROUPED,
    Specialized: ExpertsKernel.SPECIALIZED,
}


class ExpertsChoice(NamedTuple):
    """What is chosen for the experts of a layer; fields as of `pagebus.kernels.linear.dispatch.LinearChoice`."""

    kernel: ExpertsKernel
    form: str
    config: Config | CodedConfig | None
    why: str


def choose_experts(
    num_tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None, *, invariant: bool = False
) -> ExpertsChoice:
    """The kernels for so many tokens, and why."""
    if target is None:
        return ExpertsChoice(ExpertsKernel.TORCH, "experts", None, "a CPU")
    if invariant:
        config: Config = choose_invariant(num_tokens, shape, dtype, target)
        why = "--deterministic: one order of sums for any number of tokens"
    else:
        config = choose(num_tokens, shape, dtype, target)
        why = "tokens have hardly an expert in common" if isinstance(config, Unsorted) else "tokens sorted by expert"
    return ExpertsChoice(KERNELS[type(config)], "experts", config, why)


def token_counts(shape: Shape, most: int) -> list[int]:
    """Numbers of tokens up to ``most`` which together launch every kernel that fewer tokens than that may launch:
    between two of them nothing changes but the number of programs."""
    ends = {WIDE_GRID, min(MOST_UNSORTED, max(shape.top_k, shape.experts // 4)) // shape.top_k}
    means = (mean for mean in range(1, LONG_ITEM + 1) if item_size(mean) != item_size(mean + 1))
    ends |= {mean * shape.experts // shape.top_k for mean in means}
    ends |= {(1 << bit) // shape.top_k for bit in range(FEW_PAIRS.bit_length() - 1, MOST_PAIRS.bit_length())}
    return sorted({most, *(end for end in ends if 0 < end < most)})
