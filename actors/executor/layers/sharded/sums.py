"""The residual stream of ranks: what is added to it is summed over them first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pagebus.actors.executor.device.comm import Comm, whole
from pagebus.actors.executor.device.ops import Ops
from pagebus.kernels.coded.rounding import RoundedTokens
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.quantized.layouts import Weight


def with_sums(ops: Ops, comm: Comm, *, invariant: bool = False) -> Ops:
    """``ops`` of a rank: products leave their part of the sum alone, and what adds it sums it over ranks.
    ``invariant``: a token's result does not depend on others, as in a norm within a sum, whose form follows from the
    number of tokens. Sums alone have the same bits in all forms."""
    sums = RankSums(ops, comm)
    return replace(
        ops, comm=comm, partial_linear=sums.partial_linear, adapted_partial_linear=sums.adapted_partial_linear,
        add_normed=sums.add_normed, add_sum=sums.add_sum,
        add_rms_norm=sums.add_rms_norm if invariant else partial(comm.all_reduce_norm, ops.add_rms_norm),
    )  # fmt: skip


def ops_beside(ops: Ops, device: torch.device) -> Ops:
    """What drafts beside a model that computes with ``ops`` is computed with: the device's own operations, whether the
    model's are invariant or not, and sums over the same ranks."""
    own = Ops.for_device(device)
    return own if ops.comm.size == 1 else with_sums(own, ops.comm)


class RankSums:
    """As the operations of the same names, where x is a rank's part."""

    def __init__(self, ops: Ops, comm: Comm) -> None:
        self._ops, self._comm = ops, comm

    def partial_linear(
        self, x: torch.Tensor | RoundedTokens, weight: Weight, bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None, norm: NextNorm | None = None,
    ) -> torch.Tensor | HalfNorm | None:  # fmt: skip
        """Neither a residual nor half of a norm can take what is not summed yet."""
        return self._ops.partial_linear(x, weight, bias, None, None)

    def adapted_partial_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None,
        norm: NextNorm | None, table: PagedTable, plan: AdapterPlan,
    ) -> torch.Tensor | HalfNorm | None:  # fmt: skip
        """As :meth:`partial_linear`. The rank's A reads its inputs alone, so what B makes of that is a part of the same
        sum."""
        return self._ops.adapted_partial_linear(x, weight, bias, None, None, table, plan)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0,
        **options: Any,
    ) -> torch.Tensor | RoundedTokens:  # fmt: skip
        """The sum first, then the same norm for any number of tokens."""
        return self._ops.add_rms_norm(self._summed(x, residual), residual, weight, eps, scale, **options)

    def add_normed(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, following: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A norm of what is added reads the whole sum."""
        return self._ops.add_normed(self._summed(x, residual), residual, weight, eps, following)

    def add_sum(self, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> None:
        """Without a norm."""
        self._ops.add_sum(self._summed(x, residual), residual, scale)

    def _summed(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._comm.all_reduce(whole(x, residual))
