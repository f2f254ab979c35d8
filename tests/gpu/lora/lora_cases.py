"""A layer of Llama-3.1-8B with adapters, random ones, in the order in which a decoder launches its products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from pagebus.kernels.layers.norm import HalfNorm, NextNorm, add_rms_norm, rms_norm
from pagebus.kernels.linear.adapted import adapted_gated_linear, adapted_linear, adapted_partial_linear
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear
from pagebus.kernels.lora.pages import Matrices, PagedTable
from pagebus.kernels.lora.plan import AdapterPlan, plan_adapters, segment_tokens
from tests.kernels.lora.tables import contiguous_table

CUDA, BF16, EPS = "cuda", torch.bfloat16, 1e-5
HIDDEN, WIDTH, LARGEST = 4096, 14336, 64
PRODUCTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (HIDDEN, (4096, 1024, 1024)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (WIDTH, WIDTH)),
    "down": (WIDTH, (HIDDEN,)),
}
"""Inputs, and the outputs of each module."""

Stream = torch.Tensor | HalfNorm


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Of this standard deviation."""
    return torch.empty(shape, dtype=dtype, device=CUDA).normal_(0, scale)


def random_adapter(inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype = BF16) -> Matrices:
    """Its sum is about as large as a product's."""
    modules = len(widths)
    a = random(modules * rank, inputs, scale=inputs**-0.5, dtype=dtype)
    return Matrices(a, random(sum(widths), rank, scale=rank**-0.5, dtype=dtype), [0.5] * modules)


def tables(number: int, rank: int, page_size: int = 0) -> dict[str, PagedTable]:
    """So many adapters of all products of a layer, each in one page, or in two or more of so many elements, as those of
    engines are."""
    found = {
        name: contiguous_table(
            [random_adapter(inputs, widths, rank) for _ in range(number)], widths, LARGEST, page_size
        )
        for name, (inputs, widths) in PRODUCTS.items()
    }
    for name, table in found.items():
        if page_size and table.pages.shape[1] == 1:
            found[name] = replace(table, pages=table.pages.expand(-1, 2).contiguous())
    return found


class Decodes(NamedTuple):
    """Rows of one token each: the adapter of each, and where it begins."""

    rows: torch.Tensor
    starts: torch.Tensor

    def plan(self) -> AdapterPlan:
        """For one pass."""
        tokens = len(self.rows)
        return plan_adapters(self.rows, self.starts, tokens, LARGEST + 2, segment_tokens(tokens))


def decodes(tokens: int, number: int) -> Decodes:
    """Ordered by adapter; of no adapters (0) none has one."""
    rows = torch.arange(tokens, device=CUDA, dtype=torch.int32) * max(1, number) // tokens
    return Decodes(rows if number else rows.fill_(-1), torch.arange(tokens + 1, device=CUDA, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of the four products, and what follows them."""

    weights: dict[str, torch.Tensor]
    norm: NextNorm

    @classmethod
    def random(cls) -> Layer:
        weights = {name: random(sum(widths), inputs, scale=0.02) for name, (inputs, widths) in PRODUCTS.items()}
        counters = torch.zeros(HIDDEN, dtype=torch.int32, device=CUDA)
        return cls(weights, NextNorm(torch.ones(HIDDEN, dtype=BF16, device=CUDA), EPS, counters))

    def __call__(
        self, x: Stream, residual: torch.Tensor, attended: torch.Tensor, tables: dict[str, PagedTable] | None,
        plan: AdapterPlan | None,
    ) -> Stream:  # fmt: skip
        """The normed stream x [T, H] -> that of the next layer; ``attended`` [T, H] stands for attention."""
        self.product("qkv", x, residual, tables, plan)
        x = self.added(self.product("o", attended, residual, tables, plan), residual)
        x = self.product("gate_up", x, residual, tables, plan)
        return self.added(self.product("down", x, residual, tables, plan), residual)

    def added(self, product: Stream | None, residual: torch.Tensor) -> Stream:
        """The norm of the residual with the product."""
        if isinstance(product, HalfNorm):
            return product
        weight = self.norm.weight
        return rms_norm(residual, weight, EPS) if product is None else add_rms_norm(product, residual, weight, EPS)

    def product(
        self, name: str, x: Stream, residual: torch.Tensor, tables: dict[str, PagedTable] | None,
        plan: AdapterPlan | None,
    ) -> Stream | None:  # fmt: skip
        """One of them, as layers call it."""
        weight, residuals = self.weights[name], (residual, self.norm)
        if tables is None or plan is None:
            if name in ("o", "down"):
                return partial_linear(x, weight, None, *residuals)
            return (linear if name == "qkv" else gated_linear)(x, weight)
        if name in ("o", "down"):
            return adapted_partial_linear(x, weight, None, *residuals, tables[name], plan)
        return (adapted_linear if name == "qkv" else adapted_gated_linear)(x, weight, None, tables[name], plan)


@cache
def layers() -> list[Layer]:
    """Two, which are larger than the L2 cache."""
    return [Layer.random(), Layer.random()]
