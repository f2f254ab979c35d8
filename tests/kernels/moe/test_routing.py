"""Which experts tokens get: every score, groups, biases, ties, and logits that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pagebus.kernels.moe.routing import Routing, Score, route, route_reference

ROUTINGS = {
    "qwen3": (128, Routing(8)),
    "qwen2, not renormalised": (60, Routing(4, renormalise=False)),
    "mixtral": (8, Routing(2)),
    "gpt-oss": (32, Routing(4, Score.SOFTMAX_OF_TOP)),
    "deepseek v2": (24, Routing(3, renormalise=False, factor=16.0, groups=4, keep_groups=2)),
    "deepseek v3": (32, Routing(8, Score.SIGMOID, factor=2.5, groups=8, keep_groups=4, group_best=2)),
    "all experts": (5, Routing(5)),
    "one expert": (16, Routing(1, Score.SIGMOID, renormalise=False)),
}


def make(name: str, tokens: int, device: torch.device) -> tuple[torch.Tensor, Routing, torch.Tensor | None]:
    """Logits, how they are used, and a bias where the family has one."""
    num_experts, routing = ROUTINGS[name]
    bias = torch.randn(num_experts, device=device) if routing.score is Score.SIGMOID else None
    return torch.randn(tokens, num_experts, device=device) * 2, routing, bias


def agree(given: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(given[1], expected[1])
    torch.testing.assert_close(given[0], expected[0], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name: str, tokens: int, device: torch.device) -> None:
    """The reference's experts, in its order, with its weights."""
    logits, routing, bias = make(name, tokens, device)
    agree(route(logits, routing, bias), route_reference(logits, routing, bias))


def test_the_reference_by_hand(device: torch.device) -> None:
    """What each way of scoring gives for one token."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]], device=device)
    powers = [math.exp(value) for value in (2.0, 1.0)]
    total = sum(math.exp(value) for value in (0.0, 2.0, 1.0, -1.0))
    sigmoids = [1 / (1 + math.exp(-value)) for value in (2.0, 1.0)]
    for score, renormalise, expected in (
        (Score.SOFTMAX, False, [power / total for power in powers]),
        (Score.SOFTMAX, True, [power / sum(powers) for power in powers]),
        (Score.SOFTMAX_OF_TOP, False, [power / sum(powers) for power in powers]),
        (Score.SIGMOID, False, sigmoids),
        (Score.SIGMOID, True, [value / sum(sigmoids) for value in sigmoids]),
    ):
        weights, experts = route(logits, Routing(2, score, renormalise, 3.0))
        assert experts.tolist() == [[1, 2]]
        assert weights[0].tolist() == pytest.approx([3 * value for value in expected], rel=1e-6)


def test_bias_chooses_but_does_not_weigh(device: torch.device) -> None:
    """The weight is the score without it."""
    logits, bias = torch.tensor([[3.0, 0.0, 1.0]], device=device), torch.tensor([0.0, 9.0, 0.0], device=device)
    weights, experts = route(logits, Routing(2, Score.SIGMOID, renormalise=False), bias)
    assert experts.tolist() == [[1, 0]]
    assert weights[0].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-3.0))], rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 19])
def test_bias_of_logits(tokens: int, device: torch.device) -> None:
    """It counts for the choice and for the weights, as if it were in the logits."""
    num_experts, routing = ROUTINGS["gpt-oss"]
    logits, bias = torch.randn(tokens, num_experts, device=device), torch.randn(num_experts, device=device) * 2
    wanted = route_reference(logits + bias, routing)
    assert not torch.equal(wanted[1], route_reference(logits, routing)[1])
    agree(route(logits, routing, None, None, bias), wanted)
    agree(route_reference(logits, routing, None, None, bias), wanted)


def test_groups(device: torch.device) -> None:
    """The best expert of all is left out, if the sum of its group's best two is small; it is taken by the best one."""
    logits = torch.tensor([[4.0, -9.0, 2.0, 1.9, 1.0, 0.9]], device=device)
    routing = Routing(2, Score.SIGMOID, groups=3, keep_groups=1, group_best=2)
    assert route(logits, routing)[1].tolist() == [[2, 3]]
    assert route(logits, replace(routing, group_best=1))[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ROUTINGS)
def test_equal_logits(name: str, device: torch.device) -> None:
    """Of equal scores the lower index wins, among experts and among groups."""
    logits, routing, _ = make(name, 3, device)
    logits.fill_(0.25)
    _, experts = route(logits, routing)
    assert experts.tolist() == [list(range(routing.top_k))] * 3
    agree(route(logits, routing), route_reference(logits, routing))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e30])
def test_logits_of_no_use(name: str, value: float, device: torch.device) -> None:
    """There are always k different experts with finite weights, though all logits but one, or all, are this."""
    logits, routing, bias = make(name, 2, device)
    logits.fill_(value)
    logits[1, 3] = 1.0
    weights, experts = route(logits, routing, bias)
    assert weights.isfinite().all()
    for row in experts.tolist():
        assert len(set(row)) == routing.top_k
        assert all(0 <= expert < logits.shape[1] for expert in row)
    assert torch.equal(experts, route_reference(logits, routing, bias)[1])


def test_negative_logits(device: torch.device) -> None:
    """Places beyond the experts, which hold 0, do not win over negative logits."""
    logits = -torch.rand(4, 60, device=device) - 5.0
    agree(route(logits, Routing(8)), route_reference(logits, Routing(8)))


def test_padding(device: torch.device) -> None:
    """Rows that hold no token have no experts."""
    logits, padding = torch.randn(3, 16, device=device), torch.tensor([7, -1, 0], device=device)
    weights, experts = route(logits, Routing(4), None, padding)
    assert experts[1].tolist() == [-1] * 4
    assert weights[1].tolist() == [0.0] * 4
    agree((weights, experts), route_reference(logits, Routing(4), None, padding))


def test_16_bits_and_no_tokens(device: torch.device) -> None:
    """Logits of a product in float16, a view into wider rows; and none at all."""
    logits = torch.randn(5, 40, device=device).half()[:, :32]
    agree(route(logits, Routing(4)), route_reference(logits, Routing(4)))
    assert route(logits[:0], Routing(4))[1].shape == (0, 4)


@pytest.mark.parametrize(
    ("num_experts", "routing"),
    [(10, Routing(2, groups=3)), (8, Routing(5, groups=4, keep_groups=2)), (8, Routing(9)), (8, Routing(0)),
     (8, Routing(1, groups=2, keep_groups=3)), (8, Routing(1, groups=8, keep_groups=8, group_best=2)),
     (8, Routing(1, group_best=3))],
)  # fmt: skip
def test_impossible(num_experts: int, routing: Routing) -> None:
    """Refused, as there would be experts that do not exist."""
    with pytest.raises(ValueError, match=r"groups|chosen|kept"):
        routing.check(num_experts)


@pytest.mark.parametrize("call", [route, route_reference])
def test_choices_are_counted(call: Callable[..., tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Added to what is there, by expert; rows that hold no token do not count."""
    logits = torch.randn(40, 16, device=device)
    padding = torch.arange(40, device=device) % 5 - 1
    counts = torch.arange(16, dtype=torch.int32, device=device)
    _, experts = call(logits, Routing(4), None, padding, counts=counts)
    chosen = experts[experts >= 0].long()
    assert len(chosen) == 4 * 32
    assert torch.equal(counts.cpu(), torch.arange(16) + torch.bincount(chosen.cpu(), minlength=16))
