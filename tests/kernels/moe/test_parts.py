"""A part of a layer's experts, as ranks have one: what routing tells it, what it adds up to, and its launch shapes."""

from __future__ import annotations

from bisect import bisect_left

import pytest
import torch

from pagebus.kernels.moe.choice import choose, token_counts
from pagebus.kernels.moe.experts import moe_experts, moe_experts_reference
from pagebus.kernels.moe.launch.shapes import Shape, Unsorted, brought_here, buckets, items_of, last_bringing
from pagebus.kernels.moe.routing import Routing, Score, route, route_reference
from pagebus.kernels.moe.weights import ExpertWeights
from tests.kernels.moe.test_experts import H200, LIMITS, WAYS, error, expected, launched, make_layer, make_tokens

pytestmark = pytest.mark.share(6)

QWEN3 = Shape(128, 8, 2048, 768)
PARTS = (
    (Shape(64, 8, 2048, 768), 128), (Shape(2, 2, 4096, 14336), 8), (Shape(3, 1, 512, 512), 16),
    (Shape(4, 8, 2048, 768), 32), (Shape(33, 8, 2048, 768), 128),
)  # fmt: skip
"""Experts that are here, as if each token chose so many of them, and how many tokens choose among."""


def part_of(layer: ExpertWeights, own: range) -> ExpertWeights:
    tensors = [None if each is None else each[own.start : own.stop].contiguous() for each in layer[:4]]
    return ExpertWeights(*tensors, layer.gate, len(layer.down))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 19])
def test_routing_tells_a_part_what_is_its_own(tokens: int, device: torch.device) -> None:
    """Experts by their numbers within the part; weights and counts are those of all."""
    logits, routing = torch.randn(tokens, 13, device=device), Routing(3, Score.SOFTMAX_OF_TOP)
    padding = torch.arange(tokens, device=device) - 1 if tokens > 1 else None
    weights, experts = route(logits, routing, None, padding)
    seen = torch.zeros_like(experts)
    for own in (range(4), range(4, 5), range(5, 13)):
        for way in (route, route_reference):
            counts = torch.zeros(13, dtype=torch.int32, device=device)
            told, places = way(logits, routing, None, padding, counts=counts, own=own)
            torch.testing.assert_close(told, weights, rtol=2e-6, atol=1e-7)
            assert places.dtype == torch.int32
            mine = (experts >= own.start) & (experts < own.stop)
            assert torch.equal(places, torch.where(mine, experts - own.start, -1))
            assert counts.sum() == (experts >= 0).sum()
        seen += mine
    assert torch.equal(seen, (experts >= 0).int())


@pytest.mark.parametrize(("way", "biased"), [*((way, True) for way in WAYS), ("items of 16", False)])
def test_parts_add_up_to_the_whole(way: str, biased: bool, device: torch.device) -> None:
    """Unevenly divided; by every kernel. What is of another part is not read: it does not exist there."""
    layer = make_layer(torch.float32, device, experts=7, biased=biased)
    x, weights, experts = make_tokens(9, torch.float32, device, experts=7, top_k=3)
    experts[2] = -1
    total = torch.zeros(len(x), x.shape[1], dtype=torch.float64, device=device)
    for own in (range(2), range(2, 3), range(3, 7)):
        mine = (experts >= own.start) & (experts < own.stop)
        places = torch.where(mine, experts - own.start, -1)
        part = moe_experts(x, weights, places, part_of(layer, own), WAYS[way])
        assert error(part, expected(x, weights, torch.where(mine, experts, -1), layer)) < LIMITS[torch.float32]
        total += part
    assert error(total, expected(x, weights, experts, layer)) < LIMITS[torch.float32]


@pytest.mark.parametrize("way", WAYS)
def test_a_part_that_no_token_chose_gives_nothing(way: str, device: torch.device) -> None:
    layer = part_of(make_layer(torch.float32, device, experts=6, biased=True), range(3, 6))
    x, weights, experts = make_tokens(5, torch.float32, device, experts=6, top_k=2)
    nothing = torch.full_like(experts, -1)
    assert not moe_experts(x, weights, nothing, layer, WAYS[way]).any()
    assert not moe_experts_reference(x, weights, nothing, layer).any()


def test_a_half_is_a_mixture_of_half_as_many_choices() -> None:
    """So tables know it, and items are as wide as those of the whole. All experts are themselves."""
    assert brought_here(300, QWEN3, 128) == brought_here(300, QWEN3, 0) == (300, QWEN3)
    half = QWEN3._replace(experts=64)
    assert brought_here(300, half, 128) == (300, QWEN3._replace(experts=64, top_k=4))
    assert brought_here(300, Shape(4, 1, 64, 64), 16) == (75, Shape(4, 1, 64, 64))
    for tokens in (1, 4, 5, 100, 3000):
        own, part = brought_here(tokens, half, 128)
        chosen, whole = (choose(*each, torch.float32, None) for each in ((own, part), (tokens, QWEN3)))
        assert isinstance(chosen, Unsorted) == isinstance(whole, Unsorted)
        assert items_of(chosen) == items_of(whole)


@pytest.mark.parametrize(("shape", "among"), PARTS)
def test_a_part_brings_its_share_of_pairs(shape: Shape, among: int) -> None:
    """To within one token's; no token gets more experts than there are; ends of ranges are met exactly."""
    for tokens in (*range(1, 100), 1000, 8191, 8192):
        brought, part = brought_here(tokens, shape, among)
        assert 1 <= part.top_k <= part.experts
        share = tokens * shape.top_k * shape.experts / among
        assert share <= brought * part.top_k < share + part.top_k
    part = brought_here(1, shape, among)[1]
    for end in buckets(part):
        last = last_bringing(end, shape, among)
        assert brought_here(last, shape, among)[0] <= end < brought_here(last + 1, shape, among)[0]


@pytest.mark.parametrize(("shape", "among"), PARTS)
def test_counts_of_a_part_launch_all_that_fewer_launch(shape: Shape, among: int) -> None:
    """Every number of tokens has the launch shapes of the next one in the list."""
    counts = token_counts(shape, 3000, torch.bfloat16, H200, among)
    assert counts[-1] == 3000
    for tokens in range(1, 3001):
        following = counts[bisect_left(counts, tokens)]
        assert launched(tokens, shape, among) == launched(following, shape, among), (tokens, following)
