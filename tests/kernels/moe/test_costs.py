"""Launch shapes of experts are chosen for every shape and GPU, and only such as the GPU holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebus.kernels.common.machines import machine_of, machines
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.waves import programs_held
from pagebus.kernels.moe.choice import candidates_for, decide, token_counts
from pagebus.kernels.moe.launch.candidates import Way, is_known
from pagebus.kernels.moe.launch.costs import ExpertCosts, constants, load_of
from pagebus.kernels.moe.launch.resources import needs_of
from pagebus.kernels.moe.launch.rule import by_rule
from pagebus.kernels.moe.launch.shapes import (
    Config,
    Grouped,
    Shape,
    Specialized,
    Unsorted,
    bucket_of,
    buckets,
    items_of,
    kernel_of,
    pack,
    parse,
)
from pagebus.kernels.moe.sorting import most_items
from tests.grids import examples
from tests.kernels.moe.fit_costs import FILES, errors
from tests.kernels.moe.measured import measured

H200, BF16 = Target(90, 132, 4917), torch.bfloat16
KNOWN = [Target(each.architecture.capability, each.multiprocessors, round(rate)) for each, rate in machines()]
targets = st.one_of(
    st.sampled_from(KNOWN),
    st.builds(Target, st.sampled_from([80, 86, 87, 89, 90, 100, 103, 120, 121]), st.integers(1, 300)),
)
shapes = st.builds(
    Shape, st.sampled_from([1, 4, 8, 60, 128, 512]), st.sampled_from([1, 2, 4, 8, 10]),
    st.sampled_from([64, 100, 2048, 2880, 7168]), st.sampled_from([16, 40, 512, 704, 1408, 2880, 14336]),
).filter(lambda shape: shape.top_k <= shape.experts)  # fmt: skip


def assert_fits(config: Config, shape: Shape, target: Target) -> None:
    """This GPU holds a program of both products, which does not spill, and reads such rows."""
    way = Way(kernel_of(config), items_of(config))
    for one, gated in ((config.gate_up, True), (config.down, False)):
        needs = needs_of(way, one, target.capability, gated=gated)
        assert needs is not None
        assert needs.spilled == 0
        assert programs_held(one, needs, machine_of(target)) >= 1
    assert not isinstance(config, Specialized) or (target.capability == 90 and shape.is_whole)
    if isinstance(config, Grouped):
        tma = config.gate_up.tma or config.down.tma
        assert not tma or (target.capability == 90 and shape.is_aligned)


@settings(max_examples=examples(80), deadline=None)
@given(st.one_of(st.integers(1, 20_000), st.sampled_from([1, 32, 4096])), shapes, targets)
def test_every_candidate_fits(num_tokens: int, shape: Shape, target: Target) -> None:
    """In the order of their times; tables hold each of them, and say the same afterwards."""
    ranked = candidates_for(num_tokens, shape, target, 1000)
    assert [each.us for each in ranked] == sorted(each.us for each in ranked)
    assert len({each.config for each in ranked}) == len(ranked) > 0
    for us, config in ranked:
        assert 0 < us < 1e9
        assert_fits(config, shape, target)
        assert is_known(shape, config, target.capability)
        assert parse(pack(config)) == config


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(1, 20_000), shapes, targets, st.sampled_from([BF16, torch.float16, torch.float32]))
def test_every_number_of_tokens_has_a_choice(
    num_tokens: int, shape: Shape, target: Target, dtype: torch.dtype
) -> None:  # fmt: skip
    """It fits, or is the rule's for widths that no candidate has; in float32 it is always the rule's."""
    found, rule = decide(num_tokens, shape, dtype, target), by_rule(bucket_of(num_tokens, shape), shape, dtype, target)
    if dtype == torch.float32:
        assert found[:2] == (rule, Source.RULE)
    elif found.source is not Source.RULE:
        assert_fits(found.config, shape, target)
    else:
        assert found.config == rule
        assert isinstance(rule, Unsorted)
    assert (found.us is not None) == (found.source is Source.MODEL)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 40_000), shapes)
def test_buckets_keep_the_rules_ranges(num_tokens: int, shape: Shape) -> None:
    """Of all numbers of tokens of a bucket the rule says the same."""
    bucket = bucket_of(num_tokens, shape)
    assert bucket in buckets(shape)
    assert bucket >= num_tokens or bucket == buckets(shape)[-1]
    for target in (None, H200):
        assert by_rule(bucket, shape, BF16, target) == by_rule(num_tokens, shape, BF16, target)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5000), shapes, st.sampled_from([16, 32, 64, 128]))
def test_loads_are_within_what_is_possible(num_tokens: int, shape: Shape, items: int) -> None:
    """Mean numbers lie between those of the least and of the most even choice."""
    load = load_of(num_tokens, shape, items)
    assert load.pairs == num_tokens * shape.top_k
    assert 0 < load.hit <= min(shape.experts, load.pairs) * (1 + 1e-9)
    assert load.items >= max(load.hit, load.pairs / items) * (1 - 0.02)
    assert load.items <= most_items(load.pairs, shape.experts, items) * (1 + 1e-9)


def test_mean_items_are_those_of_chance() -> None:
    """Of tokens that choose experts evenly."""
    torch.manual_seed(0)
    shape, items, repeats = Shape(16, 2, 64, 64), 16, 200
    for num_tokens in (4, 60, 500):
        chosen = torch.rand(repeats, num_tokens, shape.experts).topk(shape.top_k, dim=2).indices.flatten(1)
        counts = torch.stack([(chosen == expert).sum(1) for expert in range(shape.experts)], 1)
        load = load_of(num_tokens, shape, items)
        assert load.hit == pytest.approx((counts > 0).sum(1).float().mean().item(), rel=0.03)
        assert load.items == pytest.approx((-(-counts // items)).sum(1).float().mean().item(), rel=0.03)


def test_estimates_are_near_what_was_measured() -> None:
    """On an H200: 5% off in the mean, never by more than 15%."""
    off = errors(list(measured(*FILES)), constants())
    assert len(off) > 100
    assert sum(off) / len(off) < 0.05
    assert max(off) < 0.15


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: f"{target.capability}-{target.num_multiprocessors}")
def test_more_tokens_and_larger_experts_take_longer(target: Target) -> None:
    """With the best launch shapes of each."""
    model, small, large = ExpertCosts(machine_of(target)), Shape(64, 4, 2048, 1024), Shape(64, 4, 2048, 2048)
    times = [model.ranked(tokens, small, 1)[0].us for tokens in (1, 16, 512, 8192)]
    assert times == sorted(times)
    for tokens in (1, 16, 512, 8192):
        assert model.ranked(tokens, large, 1)[0].us > model.ranked(tokens, small, 1)[0].us


def test_the_rule_stays_unless_an_estimate_is_clearly_less() -> None:
    """Launch shapes that replace it should take at most 85% of its time, on any GPU."""
    shape, replaced = Shape(128, 4, 2880, 2880), 0
    for target in KNOWN:
        model = ExpertCosts(machine_of(target))
        for bucket in buckets(shape):
            found, rule = decide(bucket, shape, BF16, target), by_rule(bucket, shape, BF16, target)
            own = model.own(bucket, shape, rule)
            if found.config != rule and own is not None:
                replaced += 1
                assert found.us is not None
                assert found.us < 0.85 * own
    assert replaced


def test_a_start_runs_what_the_cost_model_chooses() -> None:
    """Each bucket whose launch shapes differ from the next one's is among the numbers of tokens of a start."""
    shape, target = Shape(128, 8, 2048, 640), Target(80, 108, 2039)
    counts, known = token_counts(shape, 8192, BF16, target), buckets(shape)
    chosen = [decide(bucket, shape, BF16, target).config for bucket in known]
    assert any(one != by_rule(bucket, shape, BF16, target) for one, bucket in zip(chosen, known, strict=True))
    for bucket, one, other in zip(known, chosen, chosen[1:], strict=False):
        assert one == other or bucket in counts
