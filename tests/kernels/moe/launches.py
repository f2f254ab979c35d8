"""Launches of experts and routing, on tensors of no memory, that are compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.choice import choose
from pagebus.kernels.moe.experts import moe_experts
from pagebus.kernels.moe.launch.rule import choose_invariant
from pagebus.kernels.moe.launch.shapes import Config, Shape
from pagebus.kernels.moe.routing import Routing, Score, route
from pagebus.kernels.moe.shared import add_shared
from pagebus.kernels.moe.weights import ExpertWeights

QWEN3, GPT_OSS, MIXTRAL = Shape(128, 8, 2048, 768), Shape(32, 4, 2880, 2880), Shape(8, 2, 4096, 14336)
ROUTINGS = {
    "qwen3": (128, Routing(8)),
    "gpt-oss": (32, Routing(4, Score.SOFTMAX_OF_TOP)),
    "deepseek v3": (256, Routing(8, Score.SIGMOID, factor=2.5, groups=8, keep_groups=4, group_best=2)),
}


def mixtures() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each case and its launch: experts at every number of tokens at which their launch shape changes, and routing as
    families do it."""
    for tokens in (1, 16, 512, 1024, 4096):
        yield f"bf16 experts of qwen3, {tokens} tokens", partial(_experts, QWEN3, Gate(), tokens)
    for tokens in (1, 64, 4096):
        yield (
            f"bf16 experts of gpt-oss, {tokens} tokens",
            partial(_experts, GPT_OSS, Gate(GateKind.SWIGLU_CLAMPED), tokens, biased=True),
        )
    for tokens in (1, 4096):
        case = f"bf16 experts of qwen3, {tokens} tokens, invariant"
        yield case, partial(_experts, QWEN3, Gate(), tokens, invariant=True)
    yield "bf16 experts of mixtral, 64 tokens", partial(_experts, MIXTRAL, Gate(GateKind.GELU_TANH), 64)
    yield "shared expert with a gate, 64 tokens", partial(_shared, 64)
    for name, (num_experts, routing) in ROUTINGS.items():
        for tokens in (64, 4096):
            yield f"routing of {name}, {tokens} tokens", partial(_routing, num_experts, routing, tokens)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _experts(shape: Shape, gate: Gate, tokens: int, *, biased: bool = False, invariant: bool = False) -> None:
    experts, top_k, hidden, width = shape
    biases = (_meta(experts, 2 * width), _meta(experts, hidden)) if biased else (None, None)
    layer = ExpertWeights(_meta(experts, 2 * width, hidden), _meta(experts, hidden, width), *biases, gate)
    if invariant:
        config: Config = choose_invariant(tokens, shape, torch.bfloat16)
    else:
        config = choose(tokens, shape, torch.bfloat16, target_of(layer.down.device))
    weights, chosen = _meta(tokens, top_k, dtype=torch.float32), _meta(tokens, top_k, dtype=torch.int32)
    moe_experts(_meta(tokens, hidden), weights, chosen, layer, config)


def _shared(tokens: int) -> None:
    logits = _meta(tokens, 61, dtype=torch.float32)
    add_shared(_meta(tokens, 2048), _meta(tokens, 2048), logits[:, 60:])


def _routing(num_experts: int, routing: Routing, tokens: int) -> None:
    bias, counts = _meta(num_experts, dtype=torch.float32), _meta(num_experts, dtype=torch.int32)
    route(
        _meta(tokens, num_experts, dtype=torch.float32), routing, bias if routing.score is Score.SIGMOID else None,
        _meta(tokens, dtype=torch.int64), bias if routing.score is Score.SOFTMAX_OF_TOP else None, counts=counts,
    )  # fmt: skip
