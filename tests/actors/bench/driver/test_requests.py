"""Prompts and requests of a workload."""

from __future__ import annotations

import numpy as np

from pagebus.actors.bench.driver.requests import make_prompts, make_requests, scaled
from pagebus.actors.simulator.recording.trace import make_trace
from pagebus.actors.simulator.workloads import make_workload
from pagebus.bus.messages import AdapterSource


def test_prompts_have_the_lengths_of_the_trace() -> None:
    """Every prompt is as long as its row says, with ids inside the vocabulary."""
    trace = make_workload("mixed256", requests=20)
    prompts = make_prompts(trace, 50, (0,))
    assert [len(prompt) for prompt in prompts] == trace.prompt_tokens.tolist()
    assert all(prompt.min() >= 0 and prompt.max() < 50 and prompt.dtype == np.int32 for prompt in prompts)


def test_prompts_of_a_group_begin_alike() -> None:
    """Requests of a group share just the prefix; a salt changes all else; another seed changes everything."""
    trace = make_trace([40, 40], 1, prefix_groups=0, prefix_tokens=30)
    first, second = make_prompts(trace, 4096, (7,))
    (other, _), (later, _) = make_prompts(trace, 4096, (7,), salt=1), make_prompts(trace, 4096, (8,))
    assert (first[:30] == second[:30]).all()
    assert (first[30:] != second[30:]).any()
    assert (first[:30] == other[:30]).all()
    assert (first[30:] != other[30:]).any()
    assert (first[:30] != later[:30]).any()


def test_a_prompt_is_never_all_prefix() -> None:
    """At least the last token is the request's own."""
    (prompt,) = make_prompts(make_trace([16], 1, prefix_groups=0, prefix_tokens=64), 100, (0,))
    assert len(prompt) == 16


def test_the_same_seed_gives_the_same_prompts() -> None:
    """Two runs with one seed send the same tokens."""
    trace = make_workload("chat", requests=5)
    twice = [make_prompts(trace, 1000, (3, 1)) for _ in range(2)]
    assert all((a == b).all() for a, b in zip(*twice, strict=True))


def test_scaling_keeps_every_length_at_least_one() -> None:
    """Lengths shrink in proportion, never to nothing; a prefix may vanish."""
    trace = scaled(make_trace([1000, 10], [500, 1], prefix_groups=0, prefix_tokens=4), 0.1)
    assert trace.prompt_tokens.tolist() == [100, 1]
    assert trace.output_tokens.tolist() == [50, 1]
    assert trace.prefix_tokens.tolist() == [0, 0]


def test_requests_run_to_their_full_length() -> None:
    """Every request ignores end tokens and asks for just its output."""
    trace = make_trace([3, 4], [7, 9])
    requests = make_requests(trace, make_prompts(trace, 10, (0,)), "run", 0.6)
    assert [request.request_id for request in requests] == ["run-0", "run-1"]
    assert [request.sampling.max_tokens for request in requests] == [7, 9]
    assert all(request.sampling.ignore_eos and request.sampling.temperature == 0.6 for request in requests)


def test_adapters_take_turns() -> None:
    """The first request has the first adapter, and behind the last adapter the first one comes again."""
    adapters = [AdapterSource(name=name, path="", digest=name) for name in "ab"]
    trace = make_trace([3] * 5, 1)
    requests = make_requests(trace, make_prompts(trace, 10, (0,)), "run", 0.0, adapters)
    assert [request.adapter for request in requests] == [*adapters, *adapters, adapters[0]]
