"""How many plans are in flight."""

from __future__ import annotations

import pytest
from world import World, request

from actors.scheduler.pipeline import Pipeline


def depth_of(pipeline: Pipeline) -> int:
    return next(count for count in range(100) if not pipeline.has_room(count))


@pytest.mark.parametrize("most", [1, 2, 4])
def test_two_plans_before_any_step_was_measured(most: int) -> None:
    """Unless fewer are allowed."""
    assert depth_of(Pipeline(most)) == min(2, most)


@pytest.mark.parametrize(("step_ms", "depth"), [(12.0, 2), (2.6, 2), (2.0, 3), (1.0, 4), (0.1, 8)])
def test_short_steps_are_planned_further_ahead(step_ms: float, depth: int) -> None:
    """Until those behind the first last as long as a plan is on its way, or no more are allowed."""
    pipeline = Pipeline(8)

    pipeline.done(0.0, step_ms / 1e3)

    assert depth_of(pipeline) == depth


def test_a_step_that_waited_for_another_counts_from_its_end() -> None:
    """Launched early, it ran only from the end of the one before."""
    pipeline = Pipeline(4)

    pipeline.done(0.0, 0.010)
    pipeline.done(0.001, 0.0105)

    assert depth_of(pipeline) == 4


def test_an_executor_with_short_steps_gets_plans_ahead() -> None:
    """Two at first; with the first result, which took no time, as many as are allowed."""
    world = World(pipeline_depth=4)
    executor = world.join()
    world.send(request("a", [1, 2, 3, 4, 5], max_tokens=20))
    at_first = len(executor.queue)

    world.step()

    assert (at_first, len(executor.queue)) == (2, 4)
