"""Prompts that begin alike and come together: what they share is computed once, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from pagebus.actors.scheduler.core import admission
from pagebus.actors.scheduler.replica import prefix_match
from pagebus.bus.messages import AbortRequest, TokenizedRequest
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, prompt, request

HEAD = prompt(32)
"""Eight blocks."""


def alike(count: int, head: list[int] = HEAD, max_tokens: int = 2) -> list[TokenizedRequest]:
    """Requests that begin with ``head`` and have four tokens of their own each."""
    return [request(f"r{i}", head + prompt(4, i + 1), max_tokens=max_tokens) for i in range(count)]


def entered(executor: FakeExecutor, world: World) -> list[list[str]]:
    """Which requests entered the batch with each plan, for the first time or again."""
    named = {sequence_id: heard.started.request_id for sequence_id, heard in world.heard.items()}
    return [[named[new.sequence_id] for new in plan.new_sequences] for plan in executor.plans]


def test_a_shared_prefix_is_computed_once_by_a_burst() -> None:
    """All but the first find it with the plan that follows, and then all fit into one step."""
    world = World()
    executor = world.join(budget=64, num_blocks=200, max_num_seqs=16)
    world.send(*alike(7))
    assert entered(executor, world)[:2] == [["r0"], ["r1", "r2", "r3", "r4", "r5", "r6"]]
    world.run()
    world.check_end()
    assert executor.num_computed == 32 + 7 * 4 + 7
    assert [each.started.num_cached_tokens for each in world.heard.values()] == [0] + [32] * 6


def test_the_others_wait_for_a_prefix_that_takes_several_steps() -> None:
    """They share what one of them reads, chunk by chunk, to its end."""
    world = World()
    executor = world.join(budget=16, num_blocks=200, max_num_seqs=16)
    world.send(*alike(5, prompt(44)))
    world.run()
    world.check_end()
    assert executor.num_computed == 44 + 5 * 4 + 5


def test_those_behind_are_not_held_up() -> None:
    """A request that shares nothing fills the step in which the others wait."""
    world = World()
    executor = world.join(budget=64, num_blocks=200, max_num_seqs=16)
    world.send(*alike(3), request("other", prompt(20, 9), max_tokens=2))
    assert entered(executor, world)[:2] == [["r0", "other"], ["r1", "r2"]]
    world.run()
    world.check_end()


def test_not_for_less_than_a_step_costs() -> None:
    """Of a large budget a few shared blocks are no reason to wait."""
    world = World()
    executor = world.join(budget=2048, num_blocks=2000, max_num_seqs=16)
    world.send(*alike(3))
    assert entered(executor, world)[0] == ["r0", "r1", "r2"]
    world.run()
    world.check_end()


def test_only_for_what_goes_before() -> None:
    """An interactive request does not wait for a job that reads the same: the job may not get on."""
    world = World()
    executor = world.join(budget=16, num_blocks=200, max_num_seqs=16)
    long = prompt(80)
    world.send(structs.replace(request("job", long, max_tokens=2), is_job=True))
    world.send(request("chat", [*long[:72], 1, 2, 3], max_tokens=2))
    world.step()
    assert entered(executor, world) == [["job"], [], ["chat"]]
    assert executor.plans[2].num_scheduled.tolist() == [16]
    world.run()
    world.check_end()


@pytest.mark.parametrize("end", ["abort", "kill"])
def test_nobody_waits_for_what_is_gone(end: str) -> None:
    """The one that reads is aborted halfway, or its executor dies: another one goes on where it was, or anew."""
    world = World()
    executor = world.join(budget=16, num_blocks=200, max_num_seqs=16)
    world.send(*alike(4, prompt(44)))
    world.step()
    if end == "abort":
        world.send(AbortRequest(request_id="r0"))
    else:
        world.kill(executor.name)
        executor = world.join(budget=16, num_blocks=200, max_num_seqs=16, name="gpu-1", epoch=2)
    world.run()
    world.check_end()
    assert executor.num_computed <= 44 + 4 * 4 + 4


def test_a_wait_is_looked_at_by_few() -> None:
    """However many wait, a plan looks at a limited number of them."""
    world = World()
    executor = world.join(budget=32, num_blocks=2000, max_num_seqs=8)
    most, count = 8, 24
    asked: list[bool] = []
    before = prefix_match.awaits

    def count_calls(*arguments: object) -> bool:
        found = before(*arguments)  # type: ignore[arg-type]
        asked.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_match, "awaits", count_calls)
        patch.setitem(admission.MOST_WAITING, admission.PREFIX, most)
        world.send(*alike(count, prompt(24)))
    assert asked[: most + 1] == [False] + [True] * most
    world.run()
    world.check_end()
    assert executor.num_computed == 24 + count * 4 + count


@pytest.mark.parametrize("seed", range(8))
def test_waiting_computes_no_more_and_everybody_ends(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bursts over prompts that share beginnings of any length, some of them jobs or aborted, in small pools:
    with waiting, everybody gets exactly its tokens, and no more than without is computed where nothing else differs."""

    def play(*, waits: bool) -> int:
        rng, world = random.Random(seed), World(pipeline_depth=1 + seed % 3)
        if not waits:
            monkeypatch.setattr(prefix_match, "awaits", lambda *_: False)
        roomy = seed % 2 == 0
        blocks = 400 if roomy else 24
        executor = world.join(budget=rng.choice([8, 16, 64]), num_blocks=blocks, max_num_seqs=rng.choice([2, 4, 16]))
        heads = [prompt(40, each) for each in range(2)]
        for burst in range(3):
            sent = []
            for i in range(rng.randrange(2, 9)):
                made = rng.choice(heads)[: rng.randrange(1, 41)] + [rng.randrange(40) for _ in range(rng.randrange(4))]
                name = f"b{burst}-{i}"
                is_job = not roomy and rng.random() < 0.3
                sent.append(structs.replace(request(name, made, max_tokens=rng.randrange(1, 6)), is_job=is_job))
            world.send(*sent)
            for _ in range(rng.randrange(4)):
                if executor.queue:
                    world.step()
            if not roomy and rng.random() < 0.5:
                world.send(AbortRequest(request_id=f"b{burst}-0"))
        world.run()
        world.check_end()
        return executor.num_computed

    with_waiting = play(waits=True)
    without = play(waits=False)
    assert with_waiting <= without or seed % 2


def test_no_job_gives_way_to_one_that_waits_all_the_same() -> None:
    """Only once it would enter does an interactive request take a job's slot."""
    world = World()
    executor = world.join(budget=16, num_blocks=200, max_num_seqs=2)
    world.send(structs.replace(request("job", prompt(5, 7), max_tokens=20), is_job=True))
    world.step()
    world.send(*alike(2, prompt(44)))
    while world.core.replicas["gpu-0"].slots.backlog(0) > 8:
        assert not world.preempted
        world.step()
    world.run()
    world.check_end()
    assert [each.request_id for each in world.preempted] == ["job"]
    assert executor.num_computed < 2 * 44
