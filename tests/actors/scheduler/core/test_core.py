"""The scheduler's decisions, against an executor that checks every plan."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from pagebus.actors.scheduler.core import lifecycle
from pagebus.actors.scheduler.events import (
    DetokenizersLive,
    RequestOver,
    ToIngress,
    ToReplica,
)
from pagebus.bus.messages import AbortRequest, StopSequence
from tests.actors.scheduler.world import World, prompt, request


def test_a_request_runs_to_its_length() -> None:
    """One request gets the model's tokens, and leaves nothing behind."""
    world = World()
    world.join()
    world.send(request("a", prompt(10), max_tokens=12))
    world.run()
    world.check_end()
    assert [len(each.tokens) for each in world.heard.values()] == [12]


def test_two_plans_are_in_flight_before_any_result() -> None:
    """Step k+1 is planned before the tokens of step k are known."""
    world = World()
    executor = world.join()
    world.send(request("a", prompt(5), max_tokens=3))
    assert [(plan.num_decodes, plan.num_scheduled.tolist()) for plan in executor.queue] == [(0, [5]), (1, [1])]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_step_is_planned_beyond_the_length(depth: int) -> None:
    """Ends by length are known ahead: prefill and n - 1 decode steps, and one step that only frees."""
    world = World(pipeline_depth=depth)
    executor = world.join()
    world.send(request("a", prompt(5), max_tokens=4))
    world.run()
    assert [len(plan.slots) for plan in executor.plans] == [1, 1, 1, 1, 0]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    """No step exceeds the budget, and the last chunk samples."""
    world = World()
    executor = world.join(budget=16)
    world.send(request("a", prompt(40), max_tokens=2))
    world.run()
    world.check_end()
    assert [plan.num_scheduled.tolist() for plan in executor.plans[:4]] == [[16], [16], [8], [1]]


def test_large_chunks_end_where_attention_is_fast() -> None:
    """At multiples of 1024 tokens, wherever the first one begins: here behind a cached prefix."""
    world = World()
    executor = world.join(budget=5000, num_blocks=8000, max_model_len=20_000)
    world.send(request("a", prompt(4000), max_tokens=1))
    world.run()
    world.send(request("b", prompt(4000) + prompt(8000, 1), max_tokens=1))
    world.run()
    world.check_end()
    chunks = [plan.num_scheduled.tolist() for plan in executor.plans if len(plan.slots)]
    assert chunks == [[4000], [4192], [3808]]


def test_decodes_go_before_prefill_chunks() -> None:
    """While a long prompt is read, running sequences get a token in every step."""
    world = World()
    executor = world.join(budget=16)
    world.send(request("a", prompt(3), max_tokens=20))
    world.step()
    world.send(request("b", prompt(60, 1), max_tokens=1))
    world.run()
    world.check_end()
    assert all(plan.num_decodes >= 1 for plan in executor.plans[1:20])


def test_an_end_token_ends_and_rows_in_flight_are_ignored() -> None:
    """An end token is seen late; the extra step of the sequence changes nothing."""
    world = World(eos_token_ids=tuple(range(0, 40, 3)))
    world.join()
    for i in range(6):
        world.send(request(f"r{i}", prompt(6 + i, i), max_tokens=30))
    world.run()
    world.check_end()
    assert any(len(each.tokens) < 30 for each in world.heard.values())


def test_requests_wait_by_priority_then_arrival() -> None:
    """The lower priority number goes first, and among equals the earlier."""
    world = World()
    world.join(max_num_seqs=1)
    world.send(
        *(
            request(name, prompt(4, i), max_tokens=2, priority=p)
            for i, (name, p) in enumerate([("late", 1), ("first", 0), ("second", 0), ("urgent", -5)])
        )
    )
    world.run()
    assert [each.started.request_id for each in world.heard.values()] == ["urgent", "first", "second", "late"]


def test_a_full_prefix_hit_still_computes_the_last_block() -> None:
    """A prompt that is cached altogether computes its last block again, to have something to sample from."""
    world = World()
    executor = world.join()
    world.send(request("a", prompt(12), max_tokens=1))
    world.run()
    world.send(request("b", prompt(12), max_tokens=1))
    world.run()
    world.check_end()
    assert [each.started.num_cached_tokens for each in world.heard.values()] == [0, 8]
    assert executor.num_computed == 12 + 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, 4),
        ({"repetition_penalty": 1.1}, 12),
        ({"bad_words_token_ids": ((3,),)}, 12),
        ({"beam_width": 2, "n": 2}, 12),
    ],
)
def test_tokens_that_are_cached_are_not_said_unless_they_are_read(options: dict[str, Any], said: int) -> None:
    """Of a prompt of which two of three blocks are found the plan has the last one's tokens."""
    world = World()
    world.join()
    world.send(request("first", prompt(12), max_tokens=1))
    world.run()
    world.send(request("second", prompt(12), max_tokens=2, **options))
    world.run()
    plan, *_ = [plan for _, plan in world.plans if plan.new_sequences and plan.new_sequences[0].num_computed_tokens]
    (new, *_) = plan.new_sequences
    assert (new.num_tokens - new.first_token, new.num_computed_tokens) == (said, 8)
    assert plan.new_token_ids.tolist()[:said] == prompt(12)[-said:]
    world.check_end()


def test_generated_tokens_are_cached_too() -> None:
    """The next turn of a chat finds the answer of the turn before."""
    world = World()
    world.join()
    world.send(request("a", prompt(6), max_tokens=11))
    world.run()
    said = next(iter(world.heard.values())).tokens
    world.send(request("b", prompt(6) + said + [1, 2, 3], max_tokens=1))
    world.run()
    world.check_end()
    assert [each.started.num_cached_tokens for each in world.heard.values()] == [0, 16]


def test_blocks_are_found_as_soon_as_their_step_is_planned() -> None:
    """Plans are executed in order: whoever enters with the next one reads what this one writes."""
    world = World()
    executor = world.join(budget=16)
    world.send(request("a", prompt(16), max_tokens=1), request("b", prompt(16), max_tokens=1))
    assert len(executor.queue) == 2
    world.run()
    world.check_end()
    assert [each.started.num_cached_tokens for each in world.heard.values()] == [0, 12]


def test_prefix_caching_can_be_switched_off() -> None:
    """Without it nothing is looked up or listed."""
    world = World(enable_prefix_caching=False)
    world.join()
    for name in "ab":
        world.send(request(name, prompt(12), max_tokens=5))
        world.run()
    world.check_end()
    assert [each.started.num_cached_tokens for each in world.heard.values()] == [0, 0]
    assert len(world.core.replicas["gpu-0"].index) == 0


def test_another_salt_shares_nothing() -> None:
    """Equal prompts of different tenants do not meet in the cache."""

    world = World()
    world.join()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        tenant = structs.replace(request(name, prompt(12), max_tokens=1), cache_salt=salt)
        world.send(structs.replace(tenant, block_hashes=tenant.block_hashes[:0]))
        world.run()
    assert [each.started.num_cached_tokens for each in world.heard.values()] == [0, 0, 8]


def test_preemption_takes_the_newest_and_loses_no_token() -> None:
    """With too few blocks for all, the newest gives way and later goes on where it was."""
    world = World()
    world.join(num_blocks=8, budget=64)
    world.send(request("a", prompt(4), max_tokens=20), request("b", prompt(4, 1), max_tokens=20))
    world.run()
    world.check_end()
    preempted = [each.request_id for each in world.preempted]
    assert preempted
    assert set(preempted) == {"b"}


def test_preemption_takes_the_lowest_priority_first() -> None:
    """A less urgent sequence gives way to a later, more urgent one."""
    world = World()
    world.join(num_blocks=8)
    world.send(
        request("a", prompt(4), max_tokens=20, priority=5), request("b", prompt(4, 1), max_tokens=20, priority=0)
    )
    world.run()
    world.check_end()
    assert {each.request_id for each in world.preempted} == {"a"}


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """Recompute costs little while the cached blocks are still there."""
    world = World()
    world.join(num_blocks=8)
    world.send(request("a", prompt(4), max_tokens=20), request("b", prompt(4, 1), max_tokens=20))
    world.run()
    again = [new for _, plan in world.plans for new in plan.new_sequences if new.num_tokens > new.num_prompt_tokens]
    assert again
    assert any(new.num_computed_tokens for new in again)


def test_output_is_said_again_though_it_is_cached() -> None:
    """A grammar follows it. Of a sequence that comes back the prompt alone is left out."""
    world = World()
    world.join(num_blocks=8)
    world.send(request("a", prompt(4), max_tokens=20), request("b", prompt(4, 1), max_tokens=20))
    world.run()
    again = [new for _, plan in world.plans for new in plan.new_sequences if new.num_computed_tokens > 4]
    assert [new.first_token for new in again] == [new.num_prompt_tokens for new in again] == [4] * len(again)
    assert again


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"), [(128, 1, "prompt"), (60, 60, "max_tokens"), (0, 1, "prompt")]
)
def test_what_can_never_fit_is_refused_at_once(length: int, max_tokens: int, param: str) -> None:
    """A 400 that names the field, before anything is queued."""
    world = World()
    world.join(num_blocks=20, max_model_len=128)
    world.send(request("a", prompt(length), max_tokens=max_tokens))
    assert (world.failed["a"].status, world.failed["a"].param) == (400, param)
    world.check_end()


def test_what_fills_the_pool_exactly_runs() -> None:
    """The last token needs no room in the cache."""
    world = World()
    world.join(num_blocks=5)
    world.send(request("a", prompt(11), max_tokens=10))
    world.run()
    world.check_end()
    assert not world.failed


def test_a_full_queue_answers_429() -> None:
    """Beyond the limit, requests are refused; running ones do not count."""
    world = World(max_num_queued_requests=2)
    world.join(max_num_seqs=1)
    for i in range(4):
        world.send(request(f"r{i}", prompt(4, i), max_tokens=2))
    assert {name: failure.status for name, failure in world.failed.items()} == {"r3": 429}
    world.run()
    world.check_end()


def test_without_replica_or_detokenizer_requests_wait() -> None:
    """They are started as soon as both are there; what never fits is refused when the first replica joins."""
    world = World()
    world.core.handle(DetokenizersLive(()))
    world.send(request("a", prompt(4), max_tokens=2), request("b", prompt(200), max_tokens=2))
    assert world.core.planner.num_queued_requests == 2
    executor = world.join()
    assert world.failed["b"].status == 400
    assert not executor.queue
    world.send(DetokenizersLive(("text",)))
    world.run()
    world.check_end()


def test_repeats_are_ignored() -> None:
    """At-least-once delivery: the same request again, running or over, changes nothing."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=3))
    world.send(request("a", prompt(4), max_tokens=3))
    world.run()
    assert world.send(request("a", prompt(4), max_tokens=3)) == [RequestOver("a")]
    world.check_end()
    assert len(world.heard) == 1


def test_what_is_over_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is repeated or left behind by another scheduler. Of requests that are over, the latest are known."""
    monkeypatch.setattr(lifecycle, "RECENT_REQUESTS", 2)
    world = World()
    world.join()
    for name in "abc":
        world.send(request(name, prompt(4), max_tokens=1))
        world.run()
    world.core.handle(world.requests["b"])
    world.core.readmit(world.requests["c"], {})
    assert world.core.plan(world.now_s) == [RequestOver("b"), RequestOver("c")]
    world.check_end()


def test_an_abort_frees_everything_with_the_next_plan() -> None:
    """The slot is freed in the very next plan; the detokenizer drops the sequence."""
    world = World()
    executor = world.join()
    world.send(request("a", prompt(4), max_tokens=50), request("b", prompt(4, 1), max_tokens=9))
    world.step()
    world.send(AbortRequest(request_id="a"))
    world.step()
    assert executor.queue[-1].freed_slots.tolist() == [0]
    world.run()
    world.check_end()


def test_an_abort_may_overtake_its_request() -> None:
    """A request that was aborted before it came never starts."""
    world = World()
    world.join()
    world.send(AbortRequest(request_id="a"))
    world.send(request("a", prompt(4), max_tokens=3))
    assert not world.heard
    world.check_end()


def test_a_freed_slot_and_its_blocks_are_used_by_the_same_plan() -> None:
    """No step is lost between an end and the next sequence."""
    world = World()
    executor = world.join(max_num_seqs=1, num_blocks=4)
    world.send(request("a", prompt(8), max_tokens=2), request("b", prompt(8, 1), max_tokens=2))
    world.run()
    world.check_end()
    assert any(len(plan.freed_slots) and plan.new_sequences for plan in executor.plans)


def test_a_stop_string_ends_the_computation() -> None:
    """StopSequence frees the sequence; no SequenceEnded follows."""
    world = World()
    executor = world.join()
    world.stop_at[("a", 0)] = 4
    world.send(request("a", prompt(4), max_tokens=100))
    world.run()
    world.check_end()
    assert len(executor.plans) < 12
    world.send(StopSequence(request_id="a", sequence_id=999))
    world.check_end()


def test_n_choices_share_the_prompt() -> None:
    """The prompt is computed once; the others find its blocks. Seeds count up."""
    world = World()
    executor = world.join()
    world.send(request("a", prompt(21), n=3, max_tokens=4, seed=40))
    world.run()
    world.check_end()
    assert [new.num_computed_tokens for plan in executor.plans for new in plan.new_sequences] == [0, 20, 20]
    assert [new.seed for plan in executor.plans for new in plan.new_sequences] == [40, 41, 42]


def test_the_seed_comes_from_the_request_id() -> None:
    """Without a seed every request draws its own, and the same on every scheduler."""
    seeds = []
    for _ in range(2):
        world = World()
        executor = world.join()
        world.send(request("a", prompt(4), max_tokens=1), request("b", prompt(4), max_tokens=1))
        seeds.append([new.seed for plan in executor.plans for new in plan.new_sequences])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


def test_started_comes_right_before_the_first_plan() -> None:
    """All outputs of one plan call are in the order in which they must be sent."""
    world = World()
    world.join()
    outputs = world.send(request("a", prompt(4), max_tokens=2), request("b", prompt(300), max_tokens=2))
    kinds = [type(each).__name__ for each in outputs]
    assert kinds.index("ToDetokenizer") < kinds.index("ToReplica")
    assert any(isinstance(each, ToIngress) for each in outputs)
    assert sum(isinstance(each, ToReplica) for each in outputs) == 2
