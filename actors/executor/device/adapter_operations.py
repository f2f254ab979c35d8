"""The signatures of operations for adapters. What each does is said where it is defined, in :mod:`kernels`."""

from __future__ import annotations

from typing import Protocol

import torch

from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.moe.adapted.experts import ExpertTables
from pagebus.kernels.quantized.experts import Experts
from pagebus.kernels.quantized.layouts import Weight

Tensor = torch.Tensor


class PlanAdapters(Protocol):
    """:func:`pagebus.kernels.lora.plan.plan_step`"""

    def __call__(self, adapters: Tensor, query_start: Tensor, num_tokens: int) -> AdapterPlan: ...


class AdaptedProduct(Protocol):
    """:func:`pagebus.kernels.quantized.adapted.adapted_linear`"""

    def __call__(
        self, x: Tensor | HalfNorm, weight: Weight, bias: Tensor | None, table: PagedTable, plan: AdapterPlan
    ) -> Tensor: ...


class AdaptedGatedProduct(Protocol):
    """:func:`pagebus.kernels.quantized.adapted.adapted_gated_linear`"""

    def __call__(
        self, x: Tensor | HalfNorm, weight: Weight, bias: Tensor | None, table: PagedTable, plan: AdapterPlan, *,
        act: str = "silu",
    ) -> Tensor: ...  # fmt: skip


class AdaptedResidualProduct(Protocol):
    """:func:`pagebus.kernels.quantized.adapted.adapted_partial_linear`"""

    def __call__(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, norm: NextNorm | None,
        table: PagedTable, plan: AdapterPlan,
    ) -> Tensor | HalfNorm | None: ...  # fmt: skip


class AddAdapters(Protocol):
    """:func:`pagebus.kernels.lora.behind.add_adapters`"""

    def __call__(self, x: Tensor, table: PagedTable, plan: AdapterPlan, y: Tensor) -> Tensor: ...


class AddToEmbedding(Protocol):
    """:func:`pagebus.kernels.lora.embedding.add_to_embedding`"""

    def __call__(self, input_ids: Tensor, table: PagedTable, plan: AdapterPlan, y: Tensor) -> Tensor: ...


class AdaptedExpertProducts(Protocol):
    """:func:`pagebus.kernels.moe.adapted.experts.adapted_experts`"""

    def __call__(
        self, x: Tensor, weights: Tensor, experts: Tensor, layer: Experts, tables: ExpertTables, of_token: Tensor
    ) -> Tensor: ...
