"""Adapters of ranks on GPUs, in the interpreter: what they add is a part of the sum that ranks exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pagebus.actors.executor.device.comm import ONE_RANK
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.sharded.sums import with_sums
from pagebus.kernels.exchange.all_reduce import all_reduce_norm
from pagebus.kernels.exchange.choice import Choice
from pagebus.kernels.exchange.peers import Limits
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear.linear import partial_linear
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.lora.expand import Expansion
from pagebus.kernels.lora.pages import Matrices, PagedTable
from pagebus.kernels.lora.plan import DECODE_TOKENS, AdapterPlan
from pagebus.kernels.lora.shrink import shrink
from pagebus.kernels.quantized.adapted import adapted_partial_linear
from pagebus.kernels.quantized.layouts import Weight
from tests.kernels.exchange.virtual_ranks import VirtualRanks
from tests.kernels.lora.tables import contiguous_table
from tests.kernels.lora.test_adapters import LARGEST, Case, error, mixed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="parts of kernels run alone only in the interpreter")
CPU, OUTPUTS, INPUTS, TOKENS, EPS = torch.device("cpu"), 96, 320, 37, 1e-5
SHARES = slice(0, 192), slice(192, INPUTS)
"""Columns of two ranks: unequal, and no whole pieces of A."""
LIMITS = Limits(push=1 << 15, signal=1 << 15, two_shot=1 << 16, gather=1 << 11)


def table_of(case: Case, share: slice) -> PagedTable:
    """All of B, and the rank's columns of A."""
    every = [None if each is None else Matrices(each.a[:, share], each.b, each.scales) for each in case.adapters]
    return contiguous_table(every, case.widths, LARGEST)


def product(case: Case, x: torch.Tensor, plan: AdapterPlan, share: slice, residual: torch.Tensor) -> torch.Tensor:
    """A rank's part, as its layers ask for it: the product may neither add to the residual nor begin the norm, for both
    want the whole sum."""

    def alone(
        x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None,
        norm: NextNorm | None, table: PagedTable, plan: AdapterPlan,
    ) -> torch.Tensor | HalfNorm | None:  # fmt: skip
        assert residual is None
        assert norm is None
        return adapted_partial_linear(x, weight, bias, residual, norm, table, plan)

    ops = with_sums(replace(Ops.triton(), adapted_partial_linear=alone), ONE_RANK)
    norm = NextNorm(torch.ones(OUTPUTS), EPS, torch.zeros(OUTPUTS, dtype=torch.int32))
    given = x[:, share].contiguous(), case.weight[:, share].contiguous(), None, residual, norm
    part = ops.adapted_partial_linear(*given, table_of(case, share), plan)
    assert isinstance(part, torch.Tensor)
    return part


def split_product(case: Case, x: torch.Tensor, plan: AdapterPlan, share: slice) -> torch.Tensor:
    """The same as sums of two halves of K: [2, T, N]."""
    own, weight, table = x[:, share].contiguous(), case.weight[:, share].contiguous(), table_of(case, share)
    config = replace(TileConfig(64, 16, 32, 2, 4), splits=2)
    parts = partial_linear(own, weight, config=config, expansion=Expansion(shrink(own, table, plan), table, plan))
    assert isinstance(parts, torch.Tensor)
    assert parts.dim() == 3
    return parts


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_the_sum_and_its_norm_have_what_adapters_add(split: bool) -> None:
    """Through the kernel that sums over ranks, adds to the residual, and norms."""
    case, plan = Case((OUTPUTS,), CPU, inputs=INPUTS), mixed(TOKENS, DECODE_TOKENS, CPU)
    x, residual, weight = case.random(TOKENS, INPUTS), case.random(TOKENS, OUTPUTS), torch.rand(OUTPUTS) + 0.5
    expected = residual.double() + case.expected(x, plan, F.linear(x, case.weight))
    if split:
        parts = [split_product(case, x, plan, share) for share in SHARES]
    else:
        parts = [product(case, x, plan, share, residual) for share in SHARES]
    ranks, residuals = VirtualRanks(2, CPU, LIMITS), [residual.clone() for _ in SHARES]
    outs = [torch.empty(TOKENS, OUTPUTS) for _ in SHARES]
    for phases in (1, 2):
        for peers, part, own, out in zip(ranks.peers, parts, residuals, outs, strict=True):
            all_reduce_norm(part, own, weight, EPS, peers, 1.0, Choice(1 << 30, "push", 3, 4, 128), out, phases)
    normed = expected * (expected.pow(2).mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
    for own, out in zip(residuals, outs, strict=True):
        assert error(own, expected) < 1e-6
        assert error(out, normed) < 1e-6
    assert torch.equal(outs[0], outs[1])
