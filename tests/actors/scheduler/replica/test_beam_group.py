"""Beam searches on a replica: what they share, what they cost, and that they find what they would find alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from msgspec import structs

from pagebus.actors.scheduler.events import DetokenizerLost, DetokenizersLive, ProtocolError, ReplicaResult
from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.bus.messages import AbortRequest, TokenizedRequest
from tests.actors.scheduler.world import World, prompt, request


def search(name: str, tokens: list[int], width: int, **options: Any) -> TokenizedRequest:
    """A request for beams: all of them are returned unless ``n`` says otherwise."""
    return request(name, tokens, **{"n": width, "beam_width": width, **options})


@pytest.mark.parametrize("width", [1, 2, 3, 6])
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_a_search_alone(length: int, width: int) -> None:
    """Whatever the place of the prompt's end in its block."""
    world = World(eos_token_ids=(0, 5, 9, 17))
    world.join()
    world.send(search("a", prompt(length), width, max_tokens=14))
    world.run()
    world.check_end()


@pytest.mark.parametrize("options", [{}, {"length_penalty": 2.0}, {"early_stopping": True}, {"early_stopping": "never"},
                                     {"min_tokens": 9}, {"n": 1}, {"logprobs": 3}])  # fmt: skip
def test_options_reach_the_search(options: dict[str, Any]) -> None:
    """Every one of them changes what is found, or how much of it is told."""
    world = World(eos_token_ids=(0, 5, 9, 17))
    world.join()
    world.send(search("a", prompt(9), 4, max_tokens=20, **options))
    world.run()
    world.check_end()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [14, 17, 22, 30])
def test_searches_in_a_tight_pool(num_blocks: int, caching: bool, mode: str) -> None:
    """Searches and others preempt each other, and come back where they were."""
    world = World(eos_token_ids=(0, 5), pipeline_depth=3, enable_prefix_caching=caching, preemption_mode=mode)
    world.join(num_blocks=num_blocks, max_num_seqs=8, budget=16, num_host_blocks=20)
    world.send(request("before", prompt(9, 3), max_tokens=25), search("a", prompt(11), 3, max_tokens=12))
    world.send(*(request(f"r{i}", prompt(6 + i, i), max_tokens=20, n=2) for i in range(3)))
    world.send(search("b", prompt(11), 2, max_tokens=15), search("c", prompt(5), 4, max_tokens=9))
    world.run()
    world.check_end()
    assert world.core.num_preemptions or num_blocks > 20


def test_the_prompt_is_held_and_computed_once() -> None:
    """Width 6 on a prompt of 1024 tokens: its blocks, and those of the beams' own tokens."""
    world = World(block_size=16)
    executor = world.join(num_blocks=2000, block_size=16, budget=8192, max_num_seqs=16, max_model_len=4096)
    world.send(search("a", prompt(1029), 6, block_size=16, max_tokens=60))
    pool, most = world.core.replicas["gpu-0"].pool, 0
    while world.core.requests:
        most = max(most, pool.num_blocks - pool.num_free)
        world.step()
    world.run()
    world.check_end()
    assert most <= 1029 // 16 + 6 * 5
    assert executor.num_computed == 1029 + 6 * 59


def test_only_what_changes_is_sent() -> None:
    """After the beams have entered, no step brings a sequence along or copies more than one block per fork."""
    world = World()
    executor = world.join()
    world.send(search("a", prompt(30), 4, max_tokens=30))
    world.run()
    world.check_end()
    assert sum(len(plan.new_sequences) for plan in executor.plans) == 4
    assert all(len(plan.copy_sources) <= 3 for plan in executor.plans)


def test_others_keep_their_pipeline() -> None:
    """A search waits for each result; a stream beside it always has its next step planned."""
    world = World(pipeline_depth=2)
    executor = world.join()
    world.send(request("stream", prompt(5), max_tokens=60), search("a", prompt(9), 3, max_tokens=20))
    world.step()
    while "a" in world.core.requests:
        assert len(executor.queue) == 2
        world.step()
    world.run()
    world.check_end()


@pytest.mark.parametrize("steps", range(8))
def test_abort(steps: int) -> None:
    """At any time: nothing is left, and the detokenizer forgets every choice."""
    world = World()
    world.join()
    world.send(search("a", prompt(9), 3, max_tokens=20))
    for _ in range(steps):
        world.step()
    world.send(AbortRequest(request_id="a"))
    world.run()
    world.check_end()


def read_without_a_plan(world: World) -> None:
    """The scheduler has read the next result, and not planned yet."""
    result = world.executors["gpu-0"].run_one()
    for message in (ReplicaResult("gpu-0", result), *world._listen(result)):
        world.core.handle(message)


def take_back(world: World) -> None:
    """The search loses its slots, if it has any."""
    replica = world.core.replicas["gpu-0"]
    for group in list(replica.searches.values()):
        preempt(replica, group.leader)
    world.core.planner.requeue(replica)
    world.send()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("planned", [True, False])
def test_it_is_preempted_twice_at_any_time(planned: bool, mode: str) -> None:
    """With steps in flight that some of its beams are in, and before copies are made that the result has ordered."""
    for first, second in product(range(10), range(5)):
        world = World(preemption_mode=mode, pipeline_depth=3)
        world.join(num_host_blocks=60, budget=8)
        world.send(search("a", prompt(9), 3, max_tokens=10), request("b", prompt(7, 3), max_tokens=40))
        for steps in (first, second):
            for _ in range(steps):
                world.step()
            if not planned:
                read_without_a_plan(world)
            take_back(world)
        world.run()
        world.check_end()


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_another_replica_goes_on(steps: int) -> None:
    """An executor dies: the beams are computed elsewhere from the tokens they have."""
    world = World(eos_token_ids=(0, 5))
    world.join(name="gpu-0")
    world.send(search("a", prompt(9), 3, max_tokens=14))
    for _ in range(steps):
        world.step("gpu-0")
    world.join(name="gpu-1", epoch=9)
    world.kill("gpu-0")
    world.run()
    world.check_end()


@pytest.mark.parametrize(
    ("options", "limits", "param"),
    [
        ({"n": 3, "beam_width": 2}, {}, "best_of"),
        ({"n": 9, "beam_width": 9}, {"max_num_seqs": 8}, "n"),
        ({"n": 4, "beam_width": 4, "max_tokens": 60}, {"num_blocks": 30}, "max_tokens"),
        ({"n": 65, "beam_width": 65}, {}, "n"),
    ],
)
def test_what_can_never_run_is_refused(options: dict[str, Any], limits: dict[str, int], param: str) -> None:
    """More beams than slots, or than blocks for all of them to the end."""
    world = World()
    world.join(**limits)
    world.send(request("a", prompt(9), **options))
    assert world.failed["a"].param == param
    assert world.failed["a"].status == 400


def test_a_job_of_beams_makes_room() -> None:
    """All of its slots are free at once, and it finds its way back."""
    world = World(eos_token_ids=(0, 5))
    world.join(max_num_seqs=4)
    world.send(structs.replace(search("job", prompt(9), 4, max_tokens=20), is_job=True))
    for _ in range(5):
        world.step()
    world.send(request("a", prompt(5), max_tokens=6, n=4))
    assert world.core.num_preemptions == 1
    world.run()
    world.check_end()


def test_a_job_of_beams_is_promoted() -> None:
    """All of its slots are an interactive request's then."""
    world = World(priority_aging_s=0.0001)
    world.join(max_num_seqs=4)
    world.send(structs.replace(search("job", prompt(9), 3, max_tokens=20), is_job=True))
    for _ in range(6):
        world.step()
    assert not world.core.replicas["gpu-0"].slots.job.any()
    world.run()
    world.check_end()


@pytest.mark.parametrize(
    "change",
    [
        lambda result: {"logprob_rows": result.logprob_rows[:0], "top_counts": result.top_counts[:0]},
        lambda result: {"top_counts": result.top_counts - 1, "top_ids": result.top_ids[: -len(result.top_counts)],
                        "top_bits": result.top_bits[: -len(result.top_counts)]},
        lambda result: {"top_ids": result.top_ids[1:]},
        lambda result: {"logprob_rows": result.logprob_rows + 1},
    ],
)  # fmt: skip
def test_a_result_without_candidates_is_false(change: Any) -> None:
    """It changes nothing, and the true one goes on."""
    world = World()
    executor = world.join()
    world.send(search("a", prompt(9), 3, max_tokens=6))
    for _ in range(2):
        world.step()
    result = executor.run_one()
    with pytest.raises(ProtocolError, match=r"candidates|differ in length"):
        world.core.handle(ReplicaResult("gpu-0", structs.replace(result, **change(result))))
    world.send(ReplicaResult("gpu-0", result))
    world.run()
    world.check_end()


@pytest.mark.parametrize("steps", [0, 1, 4, 50])
def test_the_detokenizer_is_lost(steps: int) -> None:
    """A search does not mind: it is told when it is over, once more if it has been."""
    world = World()
    world.join()
    world.send(search("a", prompt(9), 3, max_tokens=12))
    world._done = lambda name: []  # type: ignore[method-assign]
    for _ in range(steps):
        if any(executor.queue for executor in world.executors.values()):
            world.step()
    world.send(DetokenizerLost("text"), DetokenizersLive(()))
    del world._done
    world.send(search("b", prompt(9), 3, max_tokens=12))
    world.send(DetokenizersLive(("text",)))
    world.run()
    world.check_end()
