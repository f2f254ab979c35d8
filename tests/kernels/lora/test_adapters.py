"""What adapters add to products: plans, both halves, and products that add it to their tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear.activation import adapted_activation_mul
from pagebus.kernels.linear.adapted import (
    adapted_gated_linear,
    adapted_linear,
    adapted_linear_invariant,
    adapted_partial_linear,
)
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import linear, partial_linear, residual_linear, whole_norm
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.lora.expand import Expansion, expand
from pagebus.kernels.lora.pages import Matrices, PagedTable
from pagebus.kernels.lora.plan import (
    DECODE_TOKENS,
    PRODUCTS,
    PROMPT_TOKENS,
    AdapterPlan,
    plan_adapters,
    plan_adapters_reference,
)
from pagebus.kernels.lora.reference import add_adapters_reference
from pagebus.kernels.lora.shrink import num_parts, shrink
from pagebus.kernels.lora.within import within
from pagebus.kernels.quantized import adapted
from pagebus.kernels.quantized.adapted import adapted_gated_linear_invariant
from tests.helpers.quantized.random_layouts import LAYOUTS
from tests.kernels.lora.tables import contiguous_table

LARGEST, INPUTS = 64, 300
"""Inputs fill neither the last piece of A nor the last part."""
QKV, GATE_UP, ONE = (40, 8, 22), (37, 37), (70,)
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)  # the interpreter's bfloat16 products are wrong
TILES: list[tuple[int, Config]] = [
    (1, VectorConfig(8, 64, 4)),
    (2, VectorConfig(4, 64, 4, 2)),
    (1, TileConfig(16, 16, 64, 3, 4)),
    (37, TileConfig(24, 16, 32, 3, 4)),
    (37, TileConfig(64, 64, 32, 2, 4)),
    (37, TileConfig(64, 16, 64, 2, 4, tma=True)),
]


class Case:
    """Adapters of one product: of ranks 8, 24 and 64, one with a single A for all modules, and one without any."""

    def __init__(
        self, widths: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32, inputs: int = INPUTS,
        page_size: int = 0,
    ) -> None:  # fmt: skip
        def adapter(rank: int, modules: int) -> Matrices:
            a, b = torch.randn(modules * rank, inputs) / inputs**0.5, torch.randn(sum(widths), rank) / rank**0.5
            return Matrices(a.to(device, dtype), b.to(device, dtype), [0.5 + index for index in range(len(widths))])

        every = [adapter(8, len(widths)), adapter(16, 1), None, adapter(24, len(widths)), adapter(64, len(widths))]
        self.widths, self.inputs, self.dtype, self.device = widths, inputs, dtype, device
        self.table: PagedTable = contiguous_table(every, widths, LARGEST, page_size)
        self.adapters = every
        self.weight = self.random(sum(widths), inputs) / inputs**0.5

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).to(self.device, self.dtype)

    def expected(self, x: torch.Tensor, plan: AdapterPlan, y: torch.Tensor) -> torch.Tensor:
        """y [T, N] with what adapters add, in float64."""
        y = y.double()
        for token, adapter in enumerate(plan.of_token.tolist()):
            found = self.adapters[adapter] if adapter >= 0 else None
            if found is not None:
                rank = found.b.shape[1]
                down = (found.a.double() @ x[token].double()).view(-1, rank).expand(len(self.widths), rank)
                down = down * torch.tensor(found.scales, device=self.device).double()[:, None]
                rows = down.repeat_interleave(torch.tensor(self.widths, device=self.device), dim=0)
                y[token] += (found.b.double() * rows).sum(1)
        return y


def plan_of(counts: list[int], adapters: list[int], tokens: int, device: torch.device, padding: int = 0) -> AdapterPlan:
    """Of rows with so many tokens each; behind them ``padding`` without a row."""
    rows = torch.tensor(adapters, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()
    return plan_adapters_reference(rows, starts, sum(counts) + padding, len(counts), tokens)


def mixed(num_tokens: int, tokens: int, device: torch.device) -> AdapterPlan:
    """Every adapter and none, in segments of 1, 15, 16 and 17 tokens as far as there are so many."""
    counts, adapters = [1, 2, 15, 16, 1, 17, 3, 1], [4, -1, 0, 1, 2, 3, -1, 0]
    ends = torch.tensor([0, *counts]).cumsum(0).clamp(max=num_tokens)
    left = ends.diff().tolist()
    return plan_of(left, adapters, tokens, device, num_tokens - sum(left))


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 3)), min_size=1, max_size=12),
    padding=st.integers(0, 5),
    tokens=st.sampled_from([DECODE_TOKENS, PROMPT_TOKENS]),
)
def test_plans(rows: list[tuple[int, int]], padding: int, tokens: int) -> None:
    """The kernel's are the reference's: segments hold each token with an adapter once, and end at multiples."""
    counts, adapters = [list(each) for each in zip(*rows, strict=True)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    expected = plan_of(counts, adapters, tokens, device, padding)
    if len(expected.of_token) == 0:
        return
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()
    given_ = torch.tensor(adapters, dtype=torch.int32, device=device)
    plan = plan_adapters(given_, starts, len(expected.of_token), len(rows), tokens)
    number = int(expected.segments.number)
    assert int(plan.segments.number) == number
    assert torch.equal(plan.of_token, expected.of_token)
    for name in ("first_token", "count", "adapter"):
        assert torch.equal(getattr(plan.segments, name)[:number], getattr(expected.segments, name)[:number])
    firsts, counts_ = (getattr(expected.segments, name)[:number].tolist() for name in ("first_token", "count"))
    held = [token for first, count in zip(firsts, counts_, strict=True) for token in range(first, first + count)]
    assert held == (expected.of_token >= 0).nonzero().flatten().tolist()
    assert all(first // tokens == (first + count - 1) // tokens for first, count in zip(firsts, counts_, strict=True))


@pytest.mark.parametrize(
    ("widths", "page_size", "tokens", "dtype"),
    [
        (QKV, 0, DECODE_TOKENS, DTYPES[-1]), (QKV, 2048, PROMPT_TOKENS, torch.float32),
        (GATE_UP, 2048, DECODE_TOKENS, torch.float32), (GATE_UP, 0, PROMPT_TOKENS, DTYPES[-1]),
    ],
)  # fmt: skip
def test_both_halves(
    widths: tuple[int, ...], page_size: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Of mixed ranks, in one page or in many, as decodes and as prompts; tokens without an adapter stay as they are."""
    case = Case(widths, device, dtype, page_size=page_size)
    plan = mixed(60, tokens, device)
    x, y = case.random(60, INPUTS), case.random(60, sum(widths))
    before, expected = y.clone(), case.expected(x, plan, y)
    s = shrink(x, case.table, plan)
    assert len(s) == num_parts(INPUTS, dtype, tokens)
    assert expand(s, case.table, plan, y) is y
    assert error(y, expected) < LIMITS[dtype]
    assert torch.equal(y[plan.of_token < 0], before[plan.of_token < 0])
    assert error(add_adapters_reference(x, case.table, plan, before), expected) < LIMITS[dtype]


def test_long_inputs(device: torch.device) -> None:
    """Programs multiply several blocks of K, of ranks that need several turns, and then take the next unit."""
    inputs = 2560
    case, config = Case(ONE, device, inputs=inputs, page_size=2048), TileConfig(64, 16, 32, 2, 4)
    x = case.random(40, inputs)
    for tokens in (DECODE_TOKENS, PROMPT_TOKENS):
        plan = mixed(40, tokens, device)
        expected = case.expected(x, plan, F.linear(x, case.weight))
        y = F.linear(x, case.weight)
        assert error(expand(shrink(x, case.table, plan), case.table, plan, y), expected) < 1e-6
        assert error(adapted_linear(x, case.weight, None, case.table, plan, config), expected) < 1e-6


def test_no_adapters(device: torch.device) -> None:
    """A plan without segments changes nothing, and what no adapter wrote is never read."""
    case, plan = Case(QKV, device), plan_of([5], [-1], DECODE_TOKENS, device)
    x, y = case.random(5, INPUTS), case.random(5, sum(QKV))
    before = y.clone()
    s = shrink(x, case.table, plan).fill_(torch.nan)
    assert torch.equal(expand(s, case.table, plan, y), before)
    tiles = linear(x, case.weight, config=TileConfig(24, 16, 32, 3, 4), expansion=Expansion(s, case.table, plan))
    assert torch.equal(tiles, linear(x, case.weight, config=TileConfig(24, 16, 32, 3, 4)))


def test_bits_of_a_token(device: torch.device) -> None:
    """They are the same alone as among others."""
    case = Case(QKV, device, inputs=64)
    whole, x = mixed(60, DECODE_TOKENS, device), case.random(60, 64)
    whole_sums = adapted_linear_invariant(x, case.weight, None, case.table, whole)
    for token in (0, 20, 40):
        plan = plan_of([1], [int(whole.of_token[token])], DECODE_TOKENS, device)
        alone = shrink(x[token : token + 1].contiguous(), case.table, plan)
        rank = int(case.table.places[int(plan.of_token[0]), 0])
        both = shrink(x, case.table, whole)
        for module in range(len(QKV)):
            ours = slice(module * LARGEST, module * LARGEST + rank)
            assert torch.equal(alone[:, 0, ours], both[:, token, ours])
    assert error(whole_sums, case.expected(x, whole, F.linear(x, case.weight))) < 1e-6
    gate = Case(GATE_UP, device, inputs=64)
    halves = gate.expected(x, whole, F.linear(x, gate.weight)).chunk(2, dim=1)
    gated = adapted_gated_linear_invariant(x, gate.weight, None, gate.table, whole)
    assert error(gated, F.silu(halves[0]) * halves[1]) < 1e-6


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "config"), [*((2048, *each) for each in TILES), *((0, *each) for each in TILES[::3])]
)
def test_products_in_tiles(page_size: int, num_tokens: int, config: Config, device: torch.device) -> None:
    """The plain product with a bias, and that of gate and up, whose tiles cut through modules."""
    plan = mixed(num_tokens, DECODE_TOKENS, device)
    for widths in (QKV, GATE_UP):
        case = Case(widths, device, inputs=128, page_size=page_size)
        x, bias = case.random(num_tokens, 128), case.random(sum(widths))
        expected = case.expected(x, plan, F.linear(x, case.weight, bias))
        result = adapted_linear(x, case.weight, bias, case.table, plan, config=config)
        assert error(result, expected) < 1e-6
        if widths is GATE_UP:
            gate, up = expected.chunk(2, dim=1)
            result = adapted_gated_linear(x, case.weight, bias, case.table, plan, config=config)
            assert error(result, F.silu(gate) * up) < 1e-6


@pytest.mark.parametrize(("num_tokens", "config"), TILES[2:])
def test_partial_sums_and_residuals(num_tokens: int, config: TileConfig, device: torch.device) -> None:
    """Added to partial sums once, and before the residual and the half of its norm."""
    case, config = Case(ONE, device, inputs=128), replace(config, depth=32, splits=2)
    plan, x = mixed(num_tokens, DECODE_TOKENS, device), case.random(num_tokens, 128)
    apart, together = Expansion(shrink(x, case.table, plan), case.table, plan), within(x, case.table, plan)
    expected = case.expected(x, plan, F.linear(x, case.weight))
    for expansion in (apart, together):
        parts = partial_linear(x, case.weight, config=config, expansion=expansion)
        assert isinstance(parts, torch.Tensor)
        assert error(parts.sum(0), expected) < 1e-6
    residual = case.random(num_tokens, 70)
    wanted = residual.double() + expected
    norm = NextNorm(torch.rand(70, device=device) + 0.5, 1e-5, torch.zeros(70, dtype=torch.int32, device=device))
    half = residual_linear(x, case.weight, None, residual, norm, config, within(x, case.table, plan))
    assert error(residual, wanted) < 1e-6
    assert error(half.squares.sum(0), wanted.pow(2).sum(1)) < 1e-6


def test_more_products_than_counts(device: torch.device) -> None:
    """Each product of a pass has a count of its own. When there are no more, the first half is a launch again."""
    case, plan = Case(ONE, device, inputs=128), mixed(5, DECODE_TOKENS, device)
    x, config = case.random(5, 128), TileConfig(24, 16, 32, 3, 4)
    expected = case.expected(x, plan, F.linear(x, case.weight))
    assert plan.arrivals is not None
    turns = [plan.arrivals.take() for _ in range(PRODUCTS - 1)]
    assert turns == list(range(PRODUCTS - 1))
    for _ in range(2):
        assert error(adapted_linear(x, case.weight, None, case.table, plan, config), expected) < 1e-6
    assert plan.arrivals.counts[: PRODUCTS - 1].tolist() == [0] * (PRODUCTS - 1)
    assert int(plan.arrivals.counts[-1]) > 0


def test_half_norms(device: torch.device) -> None:
    """Of half a norm, the first half of what adapters add is divided with the product."""
    case, plan = Case(GATE_UP, device, inputs=128), mixed(5, DECODE_TOKENS, device)
    x = case.random(5, 128)
    half = HalfNorm(x, x.pow(2).sum(1).unsqueeze(0), 1e-5)
    whole = whole_norm(half)
    expected = case.expected(whole, plan, F.linear(whole, case.weight))
    config = TileConfig(24, 16, 32, 3, 4)
    assert error(adapted_linear(half, case.weight, None, case.table, plan, config), expected) < 1e-6
    gate, up = expected.chunk(2, dim=1)
    gated = adapted_gated_linear(half, case.weight, None, case.table, plan, config)
    assert error(gated, F.silu(gate) * up) < 1e-6


@pytest.mark.parametrize("num_tokens", [3, 70])
def test_behind_the_library(num_tokens: int, device: torch.device) -> None:
    """Products that the library computes, of a few tokens in float32 and of more, in their three forms."""
    plan = mixed(num_tokens, DECODE_TOKENS, device)
    case = Case(GATE_UP, device, inputs=64)
    x = case.random(num_tokens, 64)
    expected = case.expected(x, plan, F.linear(x, case.weight))
    assert error(adapted_linear(x, case.weight, None, case.table, plan), expected) < 1e-6
    gate, up = expected.chunk(2, dim=1)
    assert error(adapted_gated_linear(x, case.weight, None, case.table, plan), F.silu(gate) * up) < 1e-6
    product = adapted_partial_linear(x, case.weight, None, None, None, case.table, plan)
    assert isinstance(product, torch.Tensor)
    assert error(product, expected) < 1e-6
    # More tokens than tiles add for, in our own kernel.
    config = TileConfig(64, 16, 32, 2, 4)
    assert error(adapted_linear(x, case.weight, None, case.table, plan, config), expected) < 1e-6


@pytest.mark.parametrize("page_size", [0, 2048])
def test_activations(page_size: int, device: torch.device) -> None:
    """The activation of gates adds it to products of any adapters and of none."""
    case, plan = Case(GATE_UP, device, page_size=page_size), mixed(40, DECODE_TOKENS, device)
    x, y = case.random(40, INPUTS), case.random(40, sum(GATE_UP))
    gate, up = case.expected(x, plan, y).chunk(2, dim=1)
    result = adapted_activation_mul(shrink(x, case.table, plan), case.table, plan, y)
    assert error(result, F.silu(gate) * up) < 1e-6


@pytest.mark.parametrize("layout", ["fp8 rows", "int8 rows, zeros", "int4 groups of 128, ordered"])
def test_quantized_weights(layout: str, device: torch.device) -> None:
    """Adapters read the inputs in their own order, whatever that of the weight; half norms are divided before."""
    case, plan = Case(GATE_UP, device, inputs=256), mixed(5, DECODE_TOKENS, device)
    weight, x = LAYOUTS[layout](sum(GATE_UP), 256, device), case.random(5, 256)
    half = HalfNorm(x, x.pow(2).sum(1).unsqueeze(0), 1e-5)
    for inputs in (x, half):
        whole = whole_norm(inputs)
        expected = case.expected(whole, plan, F.linear(whole, weight.dense(torch.float32)))
        gate, up = expected.chunk(2, dim=1)
        given_ = inputs, weight, None, case.table, plan
        assert error(adapted.adapted_linear(*given_), expected) < 1e-5
        assert error(adapted.adapted_linear_reference(*given_), expected) < 1e-5
        assert error(adapted.adapted_gated_linear(*given_), F.silu(gate) * up) < 1e-5
        assert error(adapted.adapted_gated_linear_reference(*given_), F.silu(gate) * up) < 1e-5
    product = adapted.adapted_partial_linear(x, weight, None, None, None, case.table, plan)
    assert isinstance(product, torch.Tensor)
    assert error(product, case.expected(x, plan, F.linear(x, weight.dense(torch.float32)))) < 1e-5
