"""Whether steps advance."""

from __future__ import annotations

from pagebus.actors.executor.step_watch import LEAST_PATIENCE_S, PATIENCE, StepWatch


class World:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.watch = StepWatch(lambda: self.now_s)

    def after(self, seconds: float) -> StepWatch:
        self.now_s += seconds
        return self.watch


def test_idle_is_not_stalled():
    """Nothing to do, and nothing done for as long as one likes."""
    world = World()
    assert world.after(1e6).stalled_s == 0
    world.watch.submitted()
    world.after(0.1).done()
    assert world.after(1e6).stalled_s == 0


def test_a_step_that_never_ends():
    """It is stalled after a while, and no longer once a result has come."""
    world = World()
    world.watch.submitted()
    world.watch.submitted()
    assert world.after(LEAST_PATIENCE_S).stalled_s == 0
    assert world.after(1).stalled_s == LEAST_PATIENCE_S + 1
    world.watch.done()
    assert world.watch.stalled_s == 0
    assert world.after(1e6).stalled_s == 1e6


def test_long_steps_earn_patience():
    """Where steps are long, they may be."""
    world = World()
    world.watch.submitted()
    world.after(20).done()
    world.watch.submitted()
    assert world.after(20 * PATIENCE).stalled_s == 0
    assert world.after(1).stalled_s == 20 * PATIENCE + 1


def test_the_wait_begins_with_the_work():
    """Time without work does not count."""
    world = World()
    world.watch.submitted()
    world.after(1).done()
    world.after(1e6).submitted()
    assert world.after(LEAST_PATIENCE_S).stalled_s == 0
