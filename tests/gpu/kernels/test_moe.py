"""Routing and experts at the shapes of real models, on the GPU, as they are chosen and in graphs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.common.target import target_of
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.choice import choose
from pagebus.kernels.moe.experts import moe_experts, moe_experts_invariant, moe_experts_reference
from pagebus.kernels.moe.launch.rule import choose_invariant
from pagebus.kernels.moe.launch.shapes import Config, GroupConfig, Grouped, PairConfig, Shape, Specialized, Unsorted
from pagebus.kernels.moe.routing import Routing, Score, route, route_reference
from pagebus.kernels.moe.sorting import sort_pairs, sort_pairs_reference
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig
from tests.gpu.errors import worst_row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BF16 = torch.bfloat16
LIMIT = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""The largest relative error of a token, of values rounded between both products."""


@dataclass(frozen=True, slots=True)
class Family:
    """Experts of one layer."""

    shape: Shape
    gate: Gate
    biased: bool = False


FAMILIES = {
    "qwen3-30b-a3b": Family(Shape(128, 8, 2048, 768), Gate()),
    "mixtral": Family(Shape(8, 2, 4096, 14336), Gate()),
    "gpt-oss": Family(Shape(32, 4, 2880, 2880), Gate(GateKind.SWIGLU_CLAMPED), biased=True),
    "gemma4": Family(Shape(128, 8, 2816, 704), Gate(GateKind.GELU_TANH)),
    "odd": Family(Shape(60, 4, 1032, 344), Gate()),
}
TOKENS = (1, 2, 4, 5, 8, 9, 31, 64, 130, 257, 600, 2000)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = False


def make_layer(family: Family, dtype: torch.dtype) -> ExpertWeights:
    experts, _, hidden, width = family.shape
    gate_up = torch.empty(experts, 2 * width, hidden, dtype=dtype, device="cuda").normal_(0, hidden**-0.5)
    down = torch.empty(experts, hidden, width, dtype=dtype, device="cuda").normal_(0, width**-0.5)
    if not family.biased:
        return ExpertWeights(gate_up, down, None, None, family.gate)
    biases = (torch.randn(each.shape[:2], device="cuda").to(dtype) for each in (gate_up, down))
    return ExpertWeights(gate_up, down, *biases, family.gate)


def make_tokens(
    count: int, family: Family, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = family.shape
    x = torch.randn(count, shape.hidden, dtype=dtype, device="cuda")
    experts = torch.rand(count, shape.experts, device="cuda").topk(shape.top_k, dim=1).indices.int()
    return x, torch.softmax(torch.randn(count, shape.top_k, device="cuda"), 1), experts


def expected(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights) -> torch.Tensor:
    """In float32, expert by expert."""
    total = torch.zeros(x.shape, device="cuda")
    for expert in experts.unique().tolist():
        if expert < 0:
            continue
        tokens, choices = (experts == expert).nonzero(as_tuple=True)
        parts = (None if each is None else each[expert].float() for each in layer[:4])
        gate_up, down, gate_up_bias, down_bias = parts
        gate, up = F.linear(x[tokens].float(), gate_up, gate_up_bias).chunk(2, dim=1)
        if layer.gate.kind is GateKind.SILU:
            hidden = F.silu(gate) * up
        elif layer.gate.kind is GateKind.GELU_TANH:
            hidden = F.gelu(gate, approximate="tanh") * up
        else:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        total.index_add_(0, tokens, F.linear(hidden, down, down_bias) * weights[tokens, choices, None])
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts(name: str, dtype: torch.dtype) -> None:
    """Any number of tokens, with whatever was chosen for it, and in the form for --deterministic."""
    family = FAMILIES[name]
    layer = make_layer(family, dtype)
    for count in TOKENS if dtype != torch.float32 else TOKENS[:8]:
        tokens = make_tokens(count, family, dtype)
        wanted = expected(*tokens, layer)
        assert worst_row(moe_experts(*tokens, layer), wanted) < LIMIT[dtype], count
        assert worst_row(moe_experts_invariant(*tokens, layer), wanted) < LIMIT[dtype], count
        assert worst_row(moe_experts_reference(*tokens, layer), wanted) < LIMIT[dtype], count


@pytest.mark.parametrize(
    "config",
    [
        Unsorted(PairConfig(4, 1024, 4, 3), PairConfig(8, 256, 4, 4, prefetch=True)),
        Unsorted(PairConfig(8, 512, 8), PairConfig(16, 512, 8, 3, prefetch=True)),
        Grouped(16, GroupConfig(64, 128, 3, 4, tma=True, programs=2), GroupConfig(64, 64, 6, 4, tma=True, programs=3)),
        Grouped(64, GroupConfig(128, 64, 3, 8), GroupConfig(128, 64, 4, 8, tma=True)),
        Grouped(128, GroupConfig(128, 64, 3, 8, tma=True, programs=1), GroupConfig(256, 64, 3, 8, tma=True)),
        Grouped(256, GroupConfig(64, 64, 3, 8, tma=True), GroupConfig(128, 64, 3, 8, tma=True, programs=1)),
        Specialized(128, SpecializedConfig(256), SpecializedConfig(128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss", "odd"])
def test_launch_shapes(name: str, config: Config) -> None:
    """Others than those that are chosen, with padding among the tokens and an expert that half of them share."""
    family = FAMILIES[name]
    if isinstance(config, Specialized) and family.shape.hidden % 64:
        pytest.skip("its depth must divide both sizes")
    layer = make_layer(family, BF16)
    for count in (3, 40) if isinstance(config, Unsorted) else (3, 300):
        x, weights, experts = make_tokens(count, family)
        half = count // 2
        experts[:half] = torch.arange(family.shape.top_k, device="cuda", dtype=torch.int32)
        experts[-1], x[-1] = -1, torch.nan
        result = moe_experts(x, weights, experts, layer, config)
        assert not result[-1].any()
        kept = expected(x[:-1], weights[:-1], experts[:-1], layer)
        assert worst_row(result[:-1], kept) < LIMIT[BF16]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss"])
def test_invariant(name: str) -> None:
    """Each token's bits are the same alone, in any batch and in a long prompt; and in any order of tokens."""
    family = FAMILIES[name]
    layer, tokens = make_layer(family, BF16), make_tokens(3000, family)
    whole = moe_experts_invariant(*tokens, layer)
    assert whole.isfinite().all()
    sizes = set()
    for count in (1, 2, 7, 16, 33, 64, 129, 256, 1000):
        some = [each[13 : 13 + count] for each in tokens]
        assert torch.equal(moe_experts_invariant(*some, layer), whole[13 : 13 + count]), count
        sizes.add(choose_invariant(count, family.shape, BF16).tokens)
    assert len(sizes) > 1
    mixed = torch.randperm(3000, device="cuda")
    assert torch.equal(moe_experts_invariant(*(each[mixed] for each in tokens), layer), whole[mixed])


@pytest.mark.parametrize("count", [1, 4, 5, 32, 256])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss"])
def test_graph(name: str, count: int) -> None:
    """A graph of a router, its experts and a product behind them serves any tokens and any choice, with kernels that
    start early: the bits are those of the same kernels outside of it, 100 times."""
    family = FAMILIES[name]
    layer = make_layer(family, BF16)
    routing = Routing(family.shape.top_k)
    router = torch.randn(family.shape.experts, family.shape.hidden, device="cuda").bfloat16() / 16
    inputs = [torch.randn(count, family.shape.hidden, device="cuda").bfloat16() for _ in range(4)]
    paddings = [torch.zeros(count, dtype=torch.int64, device="cuda") for _ in inputs]
    paddings[2][count // 2 :] = -1

    def call(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            weights, experts = route(F.linear(x, router).float(), routing, None, padding)
            x = x + moe_experts(x, weights, experts, layer)
        return x

    wanted = [call(x, padding) for x, padding in zip(inputs, paddings, strict=True)]
    x, padding = inputs[0].clone(), paddings[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x, padding)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(100):
        x.copy_(inputs[number % 4])
        padding.copy_(paddings[number % 4])
        graph.replay()
        wrong += (out != wanted[number % 4]).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize(
    ("num_experts", "routing"),
    [(128, Routing(8)), (60, Routing(4, renormalise=False)), (32, Routing(4, Score.SOFTMAX_OF_TOP)),
     (256, Routing(8, Score.SIGMOID, factor=2.5, groups=8, keep_groups=4, group_best=2)),
     (160, Routing(6, renormalise=False, factor=16.0, groups=8, keep_groups=3)), (384, Routing(8, Score.SIGMOID))],
)  # fmt: skip
def test_routing(num_experts: int, routing: Routing) -> None:
    """The reference's experts and weights, where scores are not almost equal; each token has different ones."""
    bias = torch.randn(num_experts, device="cuda") if routing.score is Score.SIGMOID else None
    for count in (1, 33, 256, 5000):
        logits = torch.randn(count, num_experts, device="cuda") * 2
        (weights, experts), (wanted, best) = (each(logits, routing, bias) for each in (route, route_reference))
        clear = (experts == best).all(1)
        assert clear.float().mean() > 0.99
        torch.testing.assert_close(weights[clear], wanted[clear], rtol=3e-6, atol=1e-7)
        assert (experts.sort(dim=1).values.diff(dim=1) > 0).all()
        logits.fill_(0.5)
        assert (route(logits, routing)[1] == torch.arange(routing.top_k, device="cuda")).all()


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2), (256, 8), (60, 4)])
def test_sort_pairs(num_experts: int, top_k: int) -> None:
    """The reference's order and items, for decodes and for long prompts, some without experts."""
    for count in (5, 64, 500, 3000, 9000):
        experts = torch.rand(count, num_experts, device="cuda").topk(top_k, dim=1).indices.int()
        experts[::7] = -1
        for tokens in (16, 128):
            given = sort_pairs(experts, num_experts, tokens)
            wanted = sort_pairs_reference(experts.cpu(), num_experts, tokens)
            items, pairs = int(wanted.num_items), int(wanted.counts.sum())
            assert int(given.num_items) == items <= len(given.items)
            assert torch.equal(given.items[:items, :3].cpu(), wanted.items[:items, :3])
            assert torch.equal(given.order[:pairs].cpu(), wanted.order[:pairs])
            assert torch.equal(given.counts.cpu(), wanted.counts)


def test_choices() -> None:
    """All ways are used by the numbers of tokens above; odd sizes have no whole steps for the last."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    for family in FAMILIES.values():
        kinds = {type(choose(count, family.shape, BF16, target)) for count in TOKENS}
        assert kinds == {Unsorted, Grouped} | (set() if family.shape.hidden % 64 else {Specialized})
