"""Times a layer's experts on the GPU at hand: several calls in a CUDA graph, each with tokens and experts of its own.

Experts are all equally likely. Weights are those of two layers or more, so that they come from memory and not from the
L2 cache; or of one where memory is short.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from pagebus.kernels.linear.tuning.timing import ROTATED_BYTES, graph_microseconds
from pagebus.kernels.moe.experts import moe_experts
from pagebus.kernels.moe.launch.shapes import Config, GroupConfig, Shape, items_of
from pagebus.kernels.moe.weights import ExpertWeights

CUDA = "cuda"
LEAST_LAYERS, CALLS = 2, 6
SHARE_OF_MEMORY = 0.3
"""That layers may take of what is free."""


class Tokens(NamedTuple):
    """What a call gets: tokens, and the weights and numbers of their experts."""

    x: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor


class ExpertsJob(NamedTuple):
    """Launch shapes of both products of such experts, to be compiled."""

    shape: Shape
    config: Config

    @property
    def name(self) -> str:
        return f"experts {self.shape.name} {self.config}"

    @property
    def kernel(self) -> object:
        """What decides which kernels are compiled: not the number of experts."""
        parts = [
            replace(each, programs=min(1, each.programs)) if isinstance(each, GroupConfig) else each
            for each in (self.config.gate_up, self.config.down)
        ]
        return self.shape.top_k, self.shape.hidden, self.shape.width, items_of(self.config), *parts

    def launch(self) -> None:
        """Once, with as few experts as a token needs."""
        shape = self.shape._replace(experts=self.shape.top_k)
        tokens = random_tokens(2, shape)
        moe_experts(*tokens, empty_layer(shape), self.config)


def empty_layer(shape: Shape) -> ExpertWeights:
    """Weights that may be anything."""
    count, hidden, width = shape.experts, shape.hidden, shape.width
    gate_up, down = (
        torch.empty(size, dtype=torch.bfloat16, device=CUDA)
        for size in ((count, 2 * width, hidden), (count, hidden, width))
    )
    return ExpertWeights(gate_up, down)


def random_layer(shape: Shape) -> ExpertWeights:
    """Random weights, of about the size that keeps results of the size of inputs."""
    layer = empty_layer(shape)
    for weight in (layer.gate_up, layer.down):
        weight.normal_(0, weight.shape[2] ** -0.5)
    return layer


def random_experts(num_tokens: int, shape: Shape) -> torch.Tensor:
    """Different experts of each token, all equally likely: [T, k] int32."""
    return torch.rand(num_tokens, shape.experts, device=CUDA).topk(shape.top_k, dim=1).indices.int()


def random_tokens(num_tokens: int, shape: Shape) -> Tokens:
    """So many, each with experts."""
    x = torch.randn(num_tokens, shape.hidden, device=CUDA).bfloat16()
    return Tokens(x, torch.rand(num_tokens, shape.top_k, device=CUDA), random_experts(num_tokens, shape))


class ExpertsBench:
    """Layers of experts of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        bytes_ = 6 * shape.experts * shape.hidden * shape.width
        wanted = min(CALLS, max(LEAST_LAYERS, -(-ROTATED_BYTES // bytes_)))
        held = int(SHARE_OF_MEMORY * torch.cuda.mem_get_info()[0] / bytes_)
        self._layers = [random_layer(shape) for _ in range(max(1, min(wanted, held)))]
        self._tokens: list[Tokens] = []

    def microseconds(self, config: Config, num_tokens: int) -> float:
        """Median time of a layer.

        Raises:
            Exception: this GPU does not take the launch shapes.
        """
        if not self._tokens or len(self._tokens[0].x) != num_tokens:
            self._tokens = [random_tokens(num_tokens, self.shape) for _ in range(CALLS)]
        return graph_microseconds(
            [
                partial(moe_experts, *tokens, self._layers[index % len(self._layers)], config)
                for index, tokens in enumerate(self._tokens)
            ]
        )
