"""Products with quantized experts against the dequantized ones in float32, at the shapes of real models, on a GPU."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.launch.shapes import Shape
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.quantized.experts import (
    QuantizedExperts,
    moe_experts,
    moe_experts_invariant,
)
from tests.gpu.kernels.test_moe import LIMIT, expected, worst_row
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS, stacked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA, ALL = torch.device("cuda"), LAYOUTS | OTHERS
SHAPES = {
    "qwen3-30b-a3b, fewer": Shape(32, 8, 2048, 768), "gpt-oss": Shape(32, 4, 2880, 2880),
    "odd": Shape(12, 4, 1032, 344),
}  # fmt: skip
CASES = [
    *((shape, torch.bfloat16) for shape in SHAPES), ("odd", torch.float16), ("odd", torch.float32)
]  # fmt: skip
TOKENS = (1, 2, 4, 5, 9, 31, 64, 130, 257, 600, 2000)
SMALL_X = 0.02
"""Random layouts have large weights: sums stay within float16."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = False


def make_layer(name: str, shape: Shape, dtype: torch.dtype) -> QuantizedExperts:
    """With biases and the clamped gate, as gpt-oss has them, at its sizes."""
    gate_up = stacked(ALL[name], shape.experts, 2 * shape.width, shape.hidden, CUDA)
    down = stacked(ALL[name], shape.experts, shape.hidden, shape.width, CUDA)
    if shape != SHAPES["gpt-oss"]:
        return QuantizedExperts(gate_up, down)
    biases = (torch.randn(each.shape[:2], device=CUDA).to(dtype) for each in (gate_up, down))
    return QuantizedExperts(gate_up, down, *biases, Gate(GateKind.SWIGLU_CLAMPED))


def make_tokens(count: int, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = (torch.randn(count, shape.hidden, device=CUDA) * SMALL_X).to(dtype)
    experts = torch.rand(count, shape.experts, device=CUDA).topk(shape.top_k, dim=1).indices.int()
    return x, torch.softmax(torch.randn(count, shape.top_k, device=CUDA), 1), experts


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("name", ALL)
def test_experts(name: str, shape: str, dtype: torch.dtype) -> None:
    """Any number of tokens, with whatever was chosen for it, and in the form for --deterministic."""
    layer, limit = make_layer(name, SHAPES[shape], dtype), LIMIT[dtype]
    dense = ExpertWeights(layer.gate_up.dense(), layer.down.dense(), *layer[2:])
    for count in TOKENS:
        tokens = make_tokens(count, SHAPES[shape], dtype)
        wanted = expected(*tokens, dense)
        assert worst_row(moe_experts(*tokens, layer), wanted) < limit, count
        assert worst_row(moe_experts_invariant(*tokens, layer), wanted) < limit, count


@pytest.mark.parametrize("name", ["mxfp4", "fp8 blocks of 128x128", "int4 groups of 128, zeros", "nvfp4"])
def test_invariant(name: str) -> None:
    """Each token's bits are the same alone, in any batch and in a long prompt; tokens without experts get zeros."""
    shape = SHAPES["gpt-oss"]
    layer, tokens = make_layer(name, shape, torch.bfloat16), make_tokens(3000, shape, torch.bfloat16)
    tokens[2][5], tokens[0][5] = -1, torch.nan
    whole = moe_experts_invariant(*tokens, layer)
    assert whole.isfinite().all()
    assert not whole[5].any()
    assert not moe_experts(*(each[5:6] for each in tokens), layer).any()
    for count in (1, 2, 7, 16, 33, 64, 129, 256, 1000):
        some = [each[13 : 13 + count] for each in tokens]
        assert torch.equal(moe_experts_invariant(*some, layer), whole[13 : 13 + count]), count
    mixed = torch.randperm(3000, device=CUDA)
    assert torch.equal(moe_experts_invariant(*(each[mixed] for each in tokens), layer), whole[mixed])


@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("name", ["mxfp4", "fp8 blocks of 128x128", "int4 groups of 24"])
def test_graph(name: str, count: int) -> None:
    """A graph of several layers serves any tokens and any choice, with kernels that start early: the bits are those of
    the same kernels outside of it."""
    shape = SHAPES["odd"]
    layer = make_layer(name, shape, torch.bfloat16)
    inputs = [make_tokens(count, shape, torch.bfloat16) for _ in range(4)]

    def call(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            product = moe_experts(x, weights, experts, layer)
            x = (product / (1 + product.abs().amax(1, keepdim=True))).to(x.dtype)
        return x

    wanted = [call(*each) for each in inputs]
    given = [each.clone() for each in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*given)
    for number in range(40):
        for held, each in zip(given, inputs[number % 4], strict=True):
            held.copy_(each)
        graph.replay()
        assert torch.equal(out, wanted[number % 4])
