"""How many plans are in flight."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.replica.pipeline import Pipeline
from tests.actors.scheduler.world import World, prompt, request


def fill(pipeline: Pipeline) -> int:
    """Plan decodes until there is no room for more; how many."""
    count = 0
    while pipeline.has_room:
        pipeline.planned(1, 1, 1)
        count += 1
    return count


@pytest.mark.parametrize("most", [1, 2, 4])
def test_two_plans_before_any_step_was_measured(most: int) -> None:
    """Unless fewer are allowed."""
    assert fill(Pipeline(most)) == min(2, most)


@pytest.mark.parametrize(("step_ms", "depth"), [(12.0, 2), (2.6, 2), (2.0, 3), (1.0, 4), (0.1, 8)])
def test_short_steps_are_planned_further_ahead(step_ms: float, depth: int) -> None:
    """Until those behind the first last as long as a plan is on its way, or no more are allowed."""
    pipeline = Pipeline(8)
    pipeline.planned(1, 1, 1)

    pipeline.done(0.0, step_ms / 1e3)

    assert fill(pipeline) == depth


def test_a_step_that_waited_for_another_counts_from_its_end() -> None:
    """Launched early, it ran only from the end of the one before."""
    pipeline = Pipeline(4)
    pipeline.planned(0, 0, 0)
    pipeline.planned(1, 1, 1)

    pipeline.done(0.0, 0.010)
    pipeline.done(0.001, 0.0105)

    assert fill(pipeline) == 4


def test_decodes_behind_a_long_prompt_are_planned_as_far_ahead_as_among_themselves() -> None:
    """The prompt says nothing of how long they last; behind them it counts for itself."""
    pipeline = Pipeline(4)
    for kind, seconds in (((1, 1), 0.001), ((2, 1), 0.5)):
        pipeline.planned(*kind, 1)
        pipeline.done(0.0, seconds)

    pipeline.planned(2, 1, 5)
    first, room = fill(pipeline), []
    pipeline.done(1.0, 1.5)
    for kind in ((2, 1), (1, 1)):
        pipeline.planned(*kind, 1)
        room.append(pipeline.has_room)

    assert (first, room) == (3, [False, False])


def test_one_slow_step_among_short_ones_counts_for_little() -> None:
    """And so does one without rows, which lasts no time at all."""
    pipeline = Pipeline(8)
    for done_s in (0.001, 0.002, 0.003, 0.0045):
        pipeline.planned(1, 1, 1)
        pipeline.done(0.0, done_s)
    pipeline.planned(0, 0, 0)
    pipeline.done(0.0045, 0.0045)

    assert fill(pipeline) == 4


def test_of_the_running_step_half_the_tokens_are_still_to_come() -> None:
    """As nobody knows here how far it is; of later ones all are."""
    pipeline = Pipeline(4)
    left = [pipeline.num_tokens]
    for tokens in (800, 0, 60):
        pipeline.planned(1, 0, tokens)
        left.append(pipeline.num_tokens)
    for _ in range(3):
        pipeline.done(0.0, 0.01)
        left.append(pipeline.num_tokens)

    assert left == [0, 400, 400, 460, 60, 30, 0]


def test_an_executor_with_short_steps_gets_plans_ahead() -> None:
    """Two at first; with the first result, which took no time, as many as are allowed."""
    world = World(pipeline_depth=4)
    executor = world.join()
    world.send(request("a", [1, 2, 3, 4, 5], max_tokens=20))
    at_first = len(executor.queue)

    world.step()
    after_the_prompt = len(executor.queue)
    world.step()

    assert (at_first, after_the_prompt, len(executor.queue)) == (2, 2, 4)


@pytest.mark.parametrize(("first", "second", "num_blocks"), [(3, 3, 11), (3, 4, 10)])
def test_a_lane_without_blocks_makes_way(first: int, second: int, num_blocks: int) -> None:
    """The sequence whose turn it is may not preempt the other, which needs no block: that one goes on."""
    world = World()
    world.join(stages=2, num_blocks=num_blocks, max_model_len=64)
    world.send(
        request("a", prompt(first, 1), max_tokens=36 - first),
        request("b", prompt(second, 2), max_tokens=36 - second),
    )
    world.run()
    world.check_end()
