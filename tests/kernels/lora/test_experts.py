"""What adapters add to experts: plans of pairs, both products and the gate, against sums in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebus.kernels.lora.pages import Matrices
from pagebus.kernels.lora.plan import DECODE_TOKENS, PROMPT_TOKENS
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.adapted import experts as adapted
from pagebus.kernels.moe.adapted.experts import (
    ExpertTables,
    adapted_experts,
    adapted_experts_invariant,
    adapted_experts_reference,
)
from pagebus.kernels.moe.adapted.gates import gate_rows, gate_rows_reference
from pagebus.kernels.moe.adapted.plan import BLOCK, PairPlan, plan_pairs, plan_pairs_reference, segment_pairs
from pagebus.kernels.moe.coded import coded_pairs
from pagebus.kernels.moe.experts import moe_experts_reference
from pagebus.kernels.moe.sorting import sort_pairs
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.quantized.experts import coded_layer
from tests.kernels.lora.tables import contiguous_table
from tests.kernels.moe import test_experts as dense
from tests.kernels.quantized import test_experts as quantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, TOP_K, LARGEST = 5, 2, 24
PLACES: list[tuple[int, bool] | None] = [(8, False), (24, False), (16, True), None]
"""Of adapters: their ranks, and whether gate and up share an A. The last one adapts no expert."""


class Adapters:
    """Of all places and experts: the matrices of both products, some experts without any."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        def product(place: int, expert: int, inputs: int, widths: tuple[int, ...]) -> Matrices | None:
            told = PLACES[place]
            if told is None or (place + expert) % 4 == 3:
                return None
            rank, shared = told
            a = torch.randn(rank if shared else len(widths) * rank, inputs, device=device) / inputs**0.5
            b = torch.randn(sum(widths), rank, device=device) / rank**0.5
            return Matrices(a.to(dtype), b.to(dtype), [0.5 + index for index in range(len(widths))])

        both, one, every = (width, width), (hidden,), [(p, e) for p in range(len(PLACES)) for e in range(EXPERTS)]
        self.gate_up = [product(*each, hidden, both) for each in every]
        self.down = [product(*each, width, one) for each in every]
        self.tables = ExpertTables(
            contiguous_table(self.gate_up, both, LARGEST), contiguous_table(self.down, one, LARGEST)
        )

    def merged(self, layer: ExpertWeights, place: int) -> ExpertWeights:
        """The layer in float64 as the adapter in a place makes it."""
        wide = ExpertWeights(*(None if each is None else each.double() for each in layer[:4]), layer.gate)
        for expert in range(EXPERTS):
            for weight, found in ((wide.gate_up, self.gate_up), (wide.down, self.down)):
                each = found[place * EXPERTS + expert]
                if each is not None:
                    weight[expert] += delta(each)
        return wide


def delta(each: Matrices) -> torch.Tensor:
    """scale B A, of all modules."""
    rank, modules = each.b.shape[1], len(each.scales)
    a = each.a.double().view(-1, rank, each.a.shape[1]).expand(modules, -1, -1)
    parts = each.b.double().chunk(modules)
    return torch.cat([scale * b @ a[index] for index, (b, scale) in enumerate(zip(parts, each.scales, strict=True))])


def make_case(
    dtype: torch.dtype, device: torch.device, count: int, kind: GateKind = GateKind.SILU
) -> tuple[Adapters, ExpertWeights, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Adapters, a layer, tokens with their experts (some have none), their places, and their sums in float64."""
    layer = dense.make_layer(dtype, device, gate=Gate(kind, 1.3, 0.7), experts=EXPERTS, biased=kind != GateKind.SILU)
    adapters = Adapters(dense.HIDDEN, dense.WIDTH, dtype, device)
    x, weights, experts = dense.make_tokens(count, dtype, device, experts=EXPERTS, top_k=TOP_K)
    experts[0, 0] = -1
    experts[1 + count // 2 :][:1] = -1
    of_token = (torch.arange(count, device=device).int() // 3 + 1) % (len(PLACES) + 1) - 1
    wanted = moe_experts_reference(x.double(), weights, experts, _wide(layer))
    for place in range(len(PLACES)):
        other = moe_experts_reference(x.double(), weights, experts, adapters.merged(layer, place))
        wanted = torch.where((of_token == place)[:, None], other, wanted)
    return adapters, layer, (x, weights, experts), of_token, wanted


def _wide(layer: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(None if each is None else each.double() for each in layer[:4]), layer.gate)


@pytest.mark.parametrize("dtype", dense.DTYPES)
@pytest.mark.parametrize(("count", "kind"), [(1, GateKind.SILU), (23, GateKind.SILU), (9, GateKind.SWIGLU_CLAMPED),
                                             (9, GateKind.GELU_TANH)])  # fmt: skip
def test_sums(count: int, kind: GateKind, dtype: torch.dtype, device: torch.device) -> None:
    adapters, layer, tokens, of_token, wanted = make_case(dtype, device, count, kind)
    limit = dense.LIMITS[dtype]
    assert dense.error(adapted_experts_reference(*tokens, layer, adapters.tables, of_token), wanted) < limit
    assert dense.error(adapted_experts(*tokens, layer, adapters.tables, of_token), wanted) < limit


def test_a_token_alone_has_the_same_bits(device: torch.device) -> None:
    """With ``--deterministic``, whoever else is in the pass."""
    adapters, layer, tokens, of_token, _ = make_case(torch.float32, device, 40)
    whole = adapted_experts_invariant(*tokens, layer, adapters.tables, of_token)
    for token in (1, 17, 39):
        alone = (each[token : token + 1] for each in tokens)
        part = adapted_experts_invariant(*alone, layer, adapters.tables, of_token[token : token + 1])
        assert torch.equal(part[0], whole[token])


def test_without_adapters_it_is_the_layer(device: torch.device) -> None:
    adapters, layer, tokens, of_token, _ = make_case(torch.float32, device, 20)
    nobody = torch.full_like(of_token, -1)
    wanted = moe_experts_reference(*tokens, layer).double()
    assert dense.error(adapted_experts(*tokens, layer, adapters.tables, nobody), wanted) < 2e-6
    assert adapted_experts(*(each[:0] for each in tokens), layer, adapters.tables, nobody[:0]).shape == (0, 48)


@pytest.mark.parametrize(("gate_up", "down"), quantized.PAIRS[:3])
def test_quantized(gate_up: str, down: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of quantized experts leaves both products alone as well; so do layouts that none reads."""
    layer = quantized.make_layer(gate_up, down, device)
    monkeypatch.setitem(globals(), "EXPERTS", quantized.EXPERTS)
    adapters = Adapters(quantized.HIDDEN, quantized.WIDTH, torch.float32, device)
    tokens = quantized.make_tokens(11, device)
    of_token = (torch.arange(11, device=device).int() // 2) % (len(PLACES) + 1) - 1
    wanted = adapted_experts_reference(*tokens, layer, adapters.tables, of_token)[:-1]
    result = adapted_experts(*tokens, layer, adapters.tables, of_token)[:-1]
    assert dense.error(result, wanted) < quantized.LIMIT
    config = quantized.config_of(layer, ordered=True)
    products = coded_pairs(coded_layer(layer), tokens[2], config)
    monkeypatch.setattr(adapted, "_products", lambda *_: (config.gate_up.tokens, *products))
    result = adapted_experts(*tokens, layer, adapters.tables, of_token)[:-1]
    assert dense.error(result, wanted) < quantized.LIMIT


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 3)), min_size=1, max_size=8),
    tokens=st.sampled_from([DECODE_TOKENS, PROMPT_TOKENS]),
    seed=st.integers(0, 99),
)
def test_plans(counts: list[tuple[int, int]], tokens: int, seed: int) -> None:
    """The kernels' are the reference's."""
    rows = torch.tensor([adapter for count, adapter in counts for _ in range(count)], dtype=torch.int32)
    if len(rows):
        check_plan(rows.to(DEVICE), tokens, seed)


@pytest.mark.parametrize("count", [BLOCK // TOP_K, BLOCK // TOP_K + 1, 5 * BLOCK // TOP_K - 3])
def test_plans_of_many_pairs(count: int, device: torch.device) -> None:
    """Each program counts what those before it have found."""
    check_plan(torch.arange(count, device=device).int() // 7 % 5 - 1, DECODE_TOKENS, count)


def check_plan(of_token: torch.Tensor, tokens: int, seed: int) -> None:
    draws = torch.rand(len(of_token), 9, generator=torch.Generator().manual_seed(seed))
    experts = draws.argsort(1)[:, :TOP_K].int()
    experts = torch.where(experts == 8, -1, experts).to(of_token.device).contiguous()
    pairs = sort_pairs(experts, 8, 16)
    found, wanted = (make(experts, of_token, pairs, 8, tokens) for make in (plan_pairs, plan_pairs_reference))
    assert told(found) == told(wanted)
    number = int(wanted.plan.segments.number)
    firsts, counts = (getattr(found.plan.segments, name)[:number].tolist() for name in ("first_token", "count"))
    held = [pair for first, count in zip(firsts, counts, strict=True) for pair in range(first, first + count)]
    assert held == (wanted.plan.of_token >= 0).nonzero().flatten().tolist()


def told(found: PairPlan) -> list[list[int]]:
    number = int(found.plan.segments.number)
    segments = (getattr(found.plan.segments, name)[:number] for name in ("first_token", "count", "adapter"))
    return [each.tolist() for each in (*segments, *found[1:], found.plan.of_token)]


def test_segments_are_long_where_experts_have_many_pairs() -> None:
    assert segment_pairs(8 * 64 - 1, 8) == DECODE_TOKENS
    assert segment_pairs(8 * 64, 8) == PROMPT_TOKENS
    assert segment_pairs(8 * 64, 8, invariant=True) == DECODE_TOKENS


@pytest.mark.parametrize("kind", GateKind)
def test_gates(kind: GateKind, device: torch.device) -> None:
    x, gate = torch.randn(7, 2 * 1030, device=device), Gate(kind, 1.3, 0.7)
    torch.testing.assert_close(gate_rows(x, gate), gate_rows_reference(x, gate))
