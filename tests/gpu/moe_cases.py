"""Layers of experts as models have them, tokens that are sent where chance sends them, and launch shapes to try."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.launch.shapes import GroupConfig, Grouped, PairConfig, Shape, Unsorted
from pagebus.kernels.moe.routing import Routing, Score
from pagebus.kernels.moe.weights import ExpertWeights

CUDA = "cuda"
SILU = Gate()
SHARED_BYTES = 227 * 1024
COPY_BYTES_PER_US, OPERATIONS_PER_US = 4.30e6, 790e6
"""What an H200 copies, and multiplies in 16 bits."""


@dataclass(frozen=True, slots=True)
class Model:
    """The experts of one layer of a model."""

    shape: Shape
    routing: Routing
    gate: Gate = SILU
    biased: bool = False

    def layer(self) -> ExpertWeights:
        """Random weights."""
        count, hidden, width = self.shape.experts, self.shape.hidden, self.shape.width
        gate_up, down = (
            torch.empty(size, dtype=torch.bfloat16, device=CUDA).normal_(0, size[2] ** -0.5)
            for size in ((count, 2 * width, hidden), (count, hidden, width))
        )
        if not self.biased:
            return ExpertWeights(gate_up, down, None, None, self.gate)
        biases = (torch.randn(each.shape[:2], device=CUDA).bfloat16() for each in (gate_up, down))
        return ExpertWeights(gate_up, down, *biases, self.gate)

    def floor(self, tokens: int, hit: float) -> float:
        """Microseconds to read the weights of ``hit`` experts, or to multiply, whatever takes longer."""
        numbers = 3 * self.shape.width * self.shape.hidden
        read = hit * numbers * 2 / COPY_BYTES_PER_US
        return max(read, self.operations(tokens) / OPERATIONS_PER_US)

    def operations(self, tokens: int) -> int:
        """Of both products."""
        return 6 * self.shape.width * self.shape.hidden * tokens * self.shape.top_k


MODELS = {
    "qwen3-30b-a3b": Model(Shape(128, 8, 2048, 768), Routing(8)),
    "gpt-oss-20b": Model(
        Shape(32, 4, 2880, 2880), Routing(4, Score.SOFTMAX_OF_TOP), Gate(GateKind.SWIGLU_CLAMPED), biased=True
    ),
    "mixtral-8x7b": Model(Shape(8, 2, 4096, 14336), Routing(2)),
    "gemma4-26b": Model(Shape(128, 8, 2816, 704), Routing(8), Gate(GateKind.GELU_TANH)),
    "deepseek-v2-lite": Model(Shape(64, 6, 2048, 1408), Routing(6, renormalise=False)),
}


def unsorted_candidates(shape: Shape) -> tuple[list[PairConfig], list[PairConfig]]:
    """Launch shapes for both products of pairs as they come."""
    gate_up = [
        PairConfig(rows, depth, warps, stages)
        for rows, depth, warps, stages in itertools.product((2, 4, 8, 16), (256, 512, 1024), (2, 4, 8), (1, 3, 4))
        if 4 <= rows * depth // (32 * warps) <= 32 and depth <= 256 * warps
    ]
    down = [
        PairConfig(rows, depth, warps, stages, prefetch)
        for rows, depth, warps, stages, prefetch in itertools.product(
            (4, 8, 16, 32), (256, 512, 1024), (4, 8), (1, 3, 4), (False, True)
        )
        if 8 <= rows * depth // (32 * warps) <= 64 and depth <= next_power_of_2(shape.width)
    ]
    return gate_up, down


def item_sizes(tokens: int, shape: Shape) -> list[int]:
    """Pairs of an item worth trying."""
    mean = max(1, tokens * shape.top_k // shape.experts)
    near = next_power_of_2(mean)
    return sorted({min(most, max(16, size)) for size in (near // 2, near, 2 * near) for most in (128, 256)})


def group_candidates(tokens: int, *, gated: bool) -> Iterator[GroupConfig]:
    """Launch shapes of one product of items of so many ``tokens``."""
    halves = 2 if gated else 1
    depths = ((64, 3), (64, 4), (64, 6), (128, 2), (128, 3), (128, 4))
    for rows, (depth, stages), warps in itertools.product((64, 128, 256), depths, (4, 8)):
        shared, sums = stages * depth * 2 * (rows * halves + tokens), rows * halves * tokens // (32 * warps)
        if shared > SHARED_BYTES or sums > 128 or (warps == 8 and sums < 16) or rows * halves > 256:
            continue
        config = GroupConfig(rows, depth, stages, warps, tma=True)
        yield config
        yield from (replace(config, programs=count) for count in (1, 2, 3) if count * shared <= SHARED_BYTES)
        if tokens <= 32 and rows == 64:
            yield replace(config, tma=False)


def distinct_kernels(configs: list[Grouped | Unsorted]) -> list[Grouped | Unsorted]:
    """One of those that are launched with the same kernels: the number of programs is none of theirs."""
    found = {}
    for config in configs:
        key = config
        if isinstance(config, Grouped):
            key = Grouped(config.tokens, *(replace(each, programs=min(1, each.programs)) for each in config[1:]))
        found[key] = config
    return list(found.values())
