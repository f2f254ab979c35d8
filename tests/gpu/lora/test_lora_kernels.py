"""Adapters at the sizes of Llama-3.1-8B, on the GPU, with the kernels that are chosen and in graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear.activation import activation_mul
from pagebus.kernels.linear.adapted import (
    adapted_gated_linear,
    adapted_linear,
    adapted_linear_invariant,
    adapted_partial_linear,
)
from pagebus.kernels.lora.expand import expand
from pagebus.kernels.lora.pages import Matrices
from pagebus.kernels.lora.plan import (
    DECODE_TOKENS,
    AdapterPlan,
    plan_adapters,
    plan_adapters_reference,
    segment_tokens,
)
from pagebus.kernels.lora.reference import add_adapters_reference
from pagebus.kernels.lora.shrink import shrink
from pagebus.kernels.quantized.adapted import adapted_gated_linear_invariant
from tests.gpu.errors import worst_row
from tests.gpu.lora.lora_cases import HIDDEN, LARGEST, PRODUCTS, layers, random, random_adapter
from tests.kernels.lora.tables import contiguous_table

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]  # fmt: skip

RANKS = (8, 64, None, 16, 24)
"""None: an adapter that does not change the product."""
LIMIT = {torch.bfloat16: 1.2e-2, torch.float32: 2e-5}
"""The largest relative error of a token."""
TOKENS = (1, 3, 16, 33, 64, 100, 256, 300, 1100)


def made(name: str, dtype: torch.dtype) -> tuple[list[Matrices | None], tuple[int, ...]]:
    inputs, widths = PRODUCTS[name]
    return [None if rank is None else random_adapter(inputs, widths, rank, dtype) for rank in RANKS], widths


def rows_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Adapters and query starts of rows of 1, 15, 16 and 17 tokens, every fifth row without an adapter."""
    lengths, left = [], tokens
    while left:
        lengths.append(min(left, (1, 15, 16, 17, 1, 1)[len(lengths) % 6]))
        left -= lengths[-1]
    rows = torch.arange(len(lengths), device="cuda", dtype=torch.int32) % (len(RANKS) + 1) - 1
    return rows, torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def plan_for(tokens: int, size: int | None = None) -> AdapterPlan:
    rows, starts = rows_of(tokens)
    return plan_adapters(rows, starts, tokens, len(rows), size or segment_tokens(tokens))


def added(x: torch.Tensor, adapters: list[Matrices | None], widths: tuple[int, ...], plan: AdapterPlan) -> torch.Tensor:
    """What adapters add, in float32, as the reference has it."""
    wide = torch.zeros(len(x), sum(widths), device="cuda")
    return add_adapters_reference(x, contiguous_table(adapters, widths, LARGEST), plan, wide)


def test_plans() -> None:
    """The reference's, of decodes and of long prompts; tokens behind the rows have no adapter."""
    for tokens in (1, 17, 256, 5000):
        for size in (16, 64):
            rows, starts = rows_of(tokens)
            given, expected = (
                each(rows, starts, tokens + 7, len(rows), size) for each in (plan_adapters, plan_adapters_reference)
            )
            number = int(expected.segments.number)
            assert int(given.segments.number) == number
            assert torch.equal(given.of_token, expected.of_token)
            for field in ("first_token", "count", "adapter"):
                ours, theirs = (getattr(each.segments, field)[:number] for each in (given, expected))
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("page_size", [0, 28 << 15])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_both_halves(name: str, dtype: torch.dtype, page_size: int) -> None:
    """Of mixed ranks, as decodes and as prompts, in one page each and in many, of no power of two."""
    adapters, widths = made(name, dtype)
    table = contiguous_table(adapters, widths, LARGEST, page_size)
    for tokens in TOKENS if dtype == torch.bfloat16 else (1, 40, 300):
        plan, x = plan_for(tokens), random(tokens, PRODUCTS[name][0], dtype=dtype)
        wanted = added(x, adapters, widths, plan)
        y = expand(shrink(x, table, plan), table, plan, torch.zeros(tokens, sum(widths), dtype=dtype, device="cuda"))
        adapted = wanted.abs().sum(1) > 0
        assert not y[~adapted].any(), tokens
        if adapted.any():
            assert worst_row(y[adapted], wanted[adapted]) < LIMIT[dtype], tokens


@pytest.mark.parametrize("page_size", [0, 1 << 20])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, page_size: int) -> None:
    """Each, by whatever kernel is chosen for so many tokens."""
    layer, inputs = layers()[0], PRODUCTS[name][0]
    adapters, widths = made(name, torch.bfloat16)
    table, weight = contiguous_table(adapters, widths, LARGEST, page_size), layer.weights[name]
    for tokens in TOKENS:
        plan, x = plan_for(tokens), random(tokens, inputs)
        wanted = F.linear(x.float(), weight.float()) + added(x, adapters, widths, plan)
        if name == "qkv":
            result, invariant = (
                each(x, weight, None, table, plan_for(tokens, size))
                for each, size in ((adapted_linear, None), (adapted_linear_invariant, DECODE_TOKENS))
            )
            assert worst_row(invariant, wanted) < LIMIT[torch.bfloat16], tokens
        elif name == "gate_up":
            result = adapted_gated_linear(x, weight, None, table, plan)
            wanted = activation_mul(wanted)
        else:
            residual, norm = random(tokens, HIDDEN), NextNorm(*layer.norm)
            wanted += residual.float()
            product = adapted_partial_linear(x, weight, None, residual, norm, table, plan)
            if isinstance(product, HalfNorm):
                assert worst_row(product.x, wanted) < LIMIT[torch.bfloat16]
            result = residual if product is None or isinstance(product, HalfNorm) else residual + (
                product if product.dim() == 2 else product.sum(0)
            )  # fmt: skip
        assert worst_row(result, wanted) < LIMIT[torch.bfloat16], tokens


def test_invariant() -> None:
    """Each token's bits are the same alone, in any batch and in a long prompt."""
    for name in ("qkv", "gate_up"):
        adapters, widths = made(name, torch.bfloat16)
        table, weight = contiguous_table(adapters, widths, LARGEST), layers()[0].weights[name]
        call = adapted_linear_invariant if name == "qkv" else adapted_gated_linear_invariant
        x, whole_plan = random(1100, HIDDEN), plan_for(1100, DECODE_TOKENS)
        whole = call(x, weight, None, table, whole_plan)
        for first, count in ((0, 1), (33, 1), (50, 7), (13, 64), (40, 300)):
            starts = torch.arange(count + 1, device="cuda", dtype=torch.int32)
            rows = whole_plan.of_token[first : first + count].contiguous()
            plan = plan_adapters(rows, starts, count, count, DECODE_TOKENS)
            part = call(x[first : first + count].contiguous(), weight, None, table, plan)
            assert torch.equal(part, whole[first : first + count]), (name, first, count)


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 256])
def test_graph(tokens: int) -> None:
    """One graph of two layers serves every mix of adapters, and none: with kernels that start early, the bits are those
    of the same kernels outside of it, 40 times."""
    made_ = {name: made(name, torch.bfloat16) for name in PRODUCTS}
    tables = {name: contiguous_table(adapters, widths, LARGEST) for name, (adapters, widths) in made_.items()}
    starts = torch.arange(tokens + 1, device="cuda", dtype=torch.int32)
    rows = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    x, attended, before = random(tokens, HIDDEN), random(tokens, HIDDEN), random(tokens, HIDDEN)
    residual = before.clone()

    def step() -> torch.Tensor:
        residual.copy_(before)
        plan = plan_adapters(rows, starts, tokens, tokens, segment_tokens(tokens))
        stream = x
        for layer in layers():
            stream = layer(stream, residual, attended, tables, plan)
        return residual.clone()

    mixes = [torch.full_like(rows, -1), torch.zeros_like(rows), torch.arange(tokens, device="cuda").int() % 6 - 1]
    mixes.append(mixes[-1].sort().values)
    wanted = []
    for mix in mixes:
        rows.copy_(mix)
        wanted.append(step())
    assert all(each.isfinite().all() for each in wanted)
    assert not torch.equal(wanted[0], wanted[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(40):
        rows.copy_(mixes[number % len(mixes)])
        graph.replay()
        wrong += (result != wanted[number % len(mixes)]).sum()
    assert int(wrong) == 0
