"""Launch shapes of a layer's experts, the numbers of tokens by which they are chosen, and how tables store them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from math import ceil, sqrt
from typing import Any, NamedTuple

from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.specialized.hopper_gemm import DEPTH, SpecializedConfig

MOST_UNSORTED = 32
"""Pairs of a token and an expert that the rule leaves unsorted, at most."""
SHORT_ITEM, LONG_ITEM = 16, 128
"""Pairs of an item, at least and at most."""
LAST_BUCKET = 8192
"""The last number of tokens by which launch shapes are chosen, or more if a mixture's items grow beyond."""


@dataclass(frozen=True, slots=True)
class PairConfig:
    """Launch shape of pairs as they come: ``rows`` of the result by ``depth`` of K at a time, in ``stages`` (1: none
    are loaded ahead).

    ``prefetch``: weights of the second product are called into the L2 cache while the first still runs.
    """

    rows: int
    depth: int
    warps: int
    stages: int = 1
    prefetch: bool = False

    def pieces(self, num_inputs: int) -> int:
        """How many pieces of a row are asked for at once, each a multiple of 16 bytes: one by each thread. A row
        that is none is asked for as a whole."""
        most = max(1, 32 * self.warps // self.rows)
        counts = (128, 64, 32, 16, 8, 4, 2)
        return next((count for count in counts if count <= most and num_inputs % (8 * count) == 0), 1)


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Launch shape of sorted pairs: ``rows`` of the result (of gate and of up, so many each) by ``depth`` of K at a
    time.

    ``tma``: weights come through the tensor memory accelerator (Hopper and later). ``programs`` for each
    multiprocessor take tiles until there are no more; 0: every tile has a program.
    """

    rows: int
    depth: int
    stages: int
    warps: int
    tma: bool = False
    programs: int = 0


class Shape(NamedTuple):
    """E experts of ``width`` I over ``hidden`` H, of which each token gets ``top_k``."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def name(self) -> str:
        """``128x8:2048x768``."""
        return f"{self.experts}x{self.top_k}:{self.hidden}x{self.width}"

    @property
    def is_aligned(self) -> bool:
        """Whether rows of both products are whole pieces of 16 bytes, as the tensor memory accelerator reads."""
        return self.hidden % 8 == 0 and self.width % 8 == 0

    @property
    def is_whole(self) -> bool:
        """Whether steps of Hopper's kernel divide both sizes."""
        return self.hidden % DEPTH == 0 and self.width % DEPTH == 0


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
ProductConfig = PairConfig | GroupConfig | SpecializedConfig
"""Of one of both products."""


class ExpertsKernel(StrEnum):
    """The kernels that multiply tokens with their experts. Quantized ones are read by `CODED`, or dequantized where it
    cannot read them."""

    PAIRS = "moe_pairs"
    GROUPED = "moe_grouped"
    SPECIALIZED = "moe_specialized"
    CODED = "moe_coded"
    DEQUANTIZED = "moe_dequantized"
    TORCH = "torch"


KERNELS: dict[type[Config], ExpertsKernel] = {
    Unsorted: ExpertsKernel.PAIRS,
    Grouped: ExpertsKernel.GROUPED,
    Specialized: ExpertsKernel.SPECIALIZED,
}
PRODUCT_CONFIGS: dict[ExpertsKernel, type[ProductConfig]] = {
    ExpertsKernel.PAIRS: PairConfig,
    ExpertsKernel.GROUPED: GroupConfig,
    ExpertsKernel.SPECIALIZED: SpecializedConfig,
}


def kernel_of(config: Config) -> ExpertsKernel:
    """Whose launch shapes these are."""
    return KERNELS[type(config)]


def items_of(config: Config) -> int:
    """Pairs of an item, at most; 1 if pairs are left as they come."""
    return 1 if isinstance(config, Unsorted) else config.tokens


def brought_here(num_tokens: int, shape: Shape, among: int) -> tuple[int, Shape]:
    """Tokens and experts by which launch shapes are chosen where the experts of ``shape`` are a part of ``among``, each
    as likely as the others: these experts bring as many pairs in the mean as a mixture of their own, of fewer choices
    for each token, would have of so many tokens. ``among`` of 0: they are all."""
    if among in (0, shape.experts):
        return num_tokens, shape
    part = _part(shape, among)
    return -(-num_tokens * shape.top_k * shape.experts // (among * part.top_k)), part


def last_bringing(num_tokens: int, shape: Shape, among: int) -> int:
    """The most tokens of which `brought_here` says no more than ``num_tokens``."""
    if among in (0, shape.experts):
        return num_tokens
    return num_tokens * among * _part(shape, among).top_k // (shape.top_k * shape.experts)


def _part(shape: Shape, among: int) -> Shape:
    """With as many choices as are here in the mean, rounded, but at least one."""
    return shape._replace(top_k=max(1, (2 * shape.top_k * shape.experts + among) // (2 * among)))


def leaves_unsorted(num_pairs: int, shape: Shape) -> bool:
    """Whether so few pairs have hardly an expert in common: those of one token have none, and each would read the
    weights of its expert anew."""
    return num_pairs <= _most_unsorted(shape)


def _most_unsorted(shape: Shape) -> int:
    return min(MOST_UNSORTED, max(shape.top_k, shape.experts // 4))


def item_size(mean: int) -> int:
    """Pairs of an item, if experts have so many on average: few experts have more, which would be read twice."""
    if mean < LONG_ITEM // 2:
        mean += ceil(2 * sqrt(mean))
    return min(LONG_ITEM, max(SHORT_ITEM, next_power_of_2(mean)))


@cache
def rule_ends(shape: Shape) -> tuple[int, ...]:
    """Numbers of tokens behind which the rule may choose something else."""
    means = (mean for mean in range(1, LONG_ITEM + 1) if item_size(mean) != item_size(mean + 1))
    ends = {_most_unsorted(shape) // shape.top_k, *(mean * shape.experts // shape.top_k for mean in means)}
    return tuple(sorted(end for end in ends if end > 0))


@cache
def buckets(shape: Shape) -> tuple[int, ...]:
    """Numbers of tokens by which launch shapes are chosen: powers of two, and the ends of the rule's ranges. A choice
    holds for its bucket's count and fewer, down to the next bucket; the last one's for all that are more, too."""
    ends = rule_ends(shape)
    last = max(LAST_BUCKET, next_power_of_2(ends[-1] + 1))
    return tuple(sorted({*ends, *(1 << bit for bit in range(last.bit_length()))}))


def bucket_of(num_tokens: int, shape: Shape) -> int:
    """The bucket of ``num_tokens``."""
    known = buckets(shape)
    return known[min(bisect_left(known, num_tokens), len(known) - 1)]


def pack(config: Config) -> dict[str, Any]:
    """``{"kernel": "moe_grouped", "tokens": 16, "gate_up": {"rows": 64, ...}, "down": {...}}``."""
    parts = {"gate_up": asdict(config.gate_up), "down": asdict(config.down)}
    return {"kernel": str(kernel_of(config)), "tokens": items_of(config), **parts}


def parse(stored: dict[str, Any]) -> Config:
    """What `pack` gave.

    Raises:
        ValueError, TypeError, KeyError: it gave something else.
    """
    kernel = ExpertsKernel(stored["kernel"])
    if kernel not in PRODUCT_CONFIGS:
        raise ValueError(f"{kernel} has no launch shapes that are measured")
    gate_up, down = (PRODUCT_CONFIGS[kernel](**stored[name]) for name in ("gate_up", "down"))
    if isinstance(gate_up, PairConfig) and isinstance(down, PairConfig):
        return Unsorted(gate_up, down)
    tokens = int(stored["tokens"])
    if isinstance(gate_up, GroupConfig) and isinstance(down, GroupConfig):
        return Grouped(tokens, gate_up, down)
    assert isinstance(gate_up, SpecializedConfig)
    assert isinstance(down, SpecializedConfig)
    return Specialized(tokens, gate_up, down)
