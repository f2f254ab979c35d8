"""Where the time of a request went, as metrics."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from pagebus.actors.scheduler.core.new_request import make_request
from pagebus.actors.scheduler.order import Order
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.messages import AbortRequest, RequestsDone, StopSequence
from tests.actors.scheduler.moves.test_pulls import LONG, Pair
from tests.actors.scheduler.world import World, request


@pytest.mark.parametrize(
    ("is_job", "first_token_s", "tokenized_s", "expected"),
    [
        (False, 17.0, 10.0, ([5.0, 1], [2.0, 1])),
        (False, 17.0, 15.5, ([0.0, 1], [2.0, 1])),  # a tokenizer whose clock is ahead
        (False, 0.0, 10.0, ([0.0, 0], [0.0, 0])),  # it never got so far
        (True, 17.0, 10.0, ([0.0, 0], [0.0, 0])),  # nobody waits for a job
    ],
)
def test_waiting_and_prefill(
    is_job: bool, first_token_s: float, tokenized_s: float, expected: tuple[list[float], list[float]]
) -> None:
    """Seconds from the tokenizer to the first step, and from there to the first token, once a request is over."""
    metrics = Metrics()
    over = make_request(replace(request("a", [1, 2, 3]), is_job=is_job), (), Order(False, 0.0))
    over.tokenized_s, over.started_s, over.first_token_s = tokenized_s, 15.0, first_token_s

    SchedulerMetrics(metrics).over(over)

    found = {
        name: [data["sum"], sum(data["counts"])] for name, _, data in metrics.snapshot()["series"] if "sum" in data
    }
    assert (found["vllm:request_queue_time_seconds"], found["vllm:request_prefill_time_seconds"]) == expected


def test_inference_and_preemptions() -> None:
    """Seconds from the first step to the last token, and how often blocks were given up; who counts is told."""
    metrics, told = Metrics(), []
    over = make_request(request("a", [1, 2, 3]), (), Order(False, 0.0))
    over.tokenized_s, over.started_s, over.first_token_s, over.ended_s = 10.0, 15.0, 17.0, 21.0
    over.num_preemptions = 2

    SchedulerMetrics(metrics, lambda: told.append("over")).over(over)

    found = {name: data["sum"] for name, _, data in metrics.snapshot()["series"] if "sum" in data}
    assert (found["vllm:request_inference_time_seconds"], found["vllm:request_num_preemptions"]) == (6.0, 2)
    assert told == ["over"]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_stop_string_is_the_end_of_inference(*, is_told: bool) -> None:
    """At the newest step, also where the scheduler hears only that the client has everything (not ``is_told``). It has
    no such time if its client has left."""
    world, metrics = World(), Metrics()
    world.join().step_s = 1.0
    world.send(request("a", [1, 2, 3], max_tokens=100), request("gone", [4, 5, 6], max_tokens=100))
    for _ in range(5):
        result = world.step()
    over, gone = world.core.requests["a"], world.core.requests["gone"]
    if is_told:
        world.send(StopSequence(request_id="a", sequence_id=over.sequences[0].id))
    world.send(RequestsDone(request_ids=("a",), attempts=(over.readers.newest.attempt,)))
    world.send(AbortRequest(request_id="gone", attempt=gone.readers.newest.attempt))
    counts = SchedulerMetrics(metrics)
    for each in (over, gone):
        each.started_s = 1.0
        counts.over(each)
    series = {name: data for name, _, data in metrics.snapshot()["series"]}
    found = series["vllm:request_inference_time_seconds"]
    assert (found["sum"], sum(found["counts"])) == (result.done_s - 1.0, 1)


def test_a_first_token_behind_a_preemption_has_a_time() -> None:
    """Also where a sequence gave its blocks up while the step with its first token was computed."""
    world, over = World(), []
    world.join(num_blocks=8, budget=8, max_num_seqs=6).step_s = 1.0
    for name, length, max_tokens, steps in (("a", 12, 7, 2), ("b", 3, 4, 1), ("c", 6, 3, 0)):
        world.send(request(name, [(each * 7 + ord(name)) % 90 for each in range(length)], max_tokens=max_tokens))
        over.append(world.core.requests[name])
        for _ in range(steps):
            world.step()
    world.run()
    assert any(each.num_preemptions for each in over)
    assert all(each.first_token_s for each in over)


def test_preemptions_of_requests_are_those_of_replicas() -> None:
    """One that waits for its blocks to come back, and gives its place up, has begun nothing that it could lose."""
    draws, world, over = random.Random(21), World(preemption_mode="auto", pipeline_depth=4), []
    world.join(num_blocks=12, num_host_blocks=80, max_num_seqs=4, copy_lag=5)
    for number in range(8):
        tokens = [draws.randrange(90) for _ in range(draws.randint(3, 14))]
        world.send(request(f"r{number}", tokens, max_tokens=draws.randint(3, 20)))
        over.append(world.core.requests[f"r{number}"])
        for _ in range(draws.choice([0, 0, 1, 3])):
            world.step()
    world.run()
    assert sum(each.num_preemptions for each in over) == world.core.num_preemptions > 0


def test_the_first_token_of_a_beam_search() -> None:
    """Is chosen with the result of its prompt, and so has that step's time."""
    world = World()
    world.join().step_s = 1.0
    world.send(request("a", [1, 2, 3], max_tokens=4, beam_width=2, n=2))
    over, result = world.core.requests["a"], world.step()
    world.run()
    assert 0 < result.done_s == over.first_token_s < over.ended_s


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (0, {"gpu-0": [0, 0, 9, 0], "gpu-1": [9, 36, 0, 0]}),
        (1, {"gpu-0": [0, 0, 0, 0], "gpu-1": [0, 0, 0, 9]}),
    ],
)
def test_pulled_blocks_and_their_tokens(fails: int, expected: dict[str, list[int]]) -> None:
    """Counts of each replica, also of one that leaves before the next look at it."""
    pair, metrics = Pair(), Metrics()
    counts = SchedulerMetrics(metrics)
    counts.update(pair.world.core)
    pair.target.pulls.fails = fails
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.end()
    for replica in pair.world.core.replicas.values():
        counts.forget(replica)
    names = ("pulled_blocks", "pulled_tokens", "lent_blocks", "failed_pull_blocks")
    series = {(name, labels.get("engine")): data.get("value") for name, labels, data in metrics.snapshot()["series"]}
    for engine, values in expected.items():
        assert [series[f"pagebus:{name}_total", engine] for name in names] == values


def test_an_executor_that_has_left_has_no_gauges() -> None:
    """Zeros would lower the means over executors for ever; what it has counted stays."""
    world, metrics = World(), Metrics()
    counts = SchedulerMetrics(metrics)
    for name in ("gpu-0", "gpu-1"):
        world.join(name=name)
    counts.update(world.core)

    world.kill("gpu-1")
    counts.update(world.core)

    shown = {(name, labels.get("engine")) for name, labels, _ in metrics.snapshot()["series"]}
    usage, queries = "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries"
    assert {each for each in shown if each[0] in (usage, queries)} == {
        (usage, "gpu-0"), (queries, "gpu-0"), (queries, "gpu-1"),
    }  # fmt: skip
