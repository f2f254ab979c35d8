"""Whether steps advance."""

from __future__ import annotations

from pagebus.actors.executor.step_watch import LEAST_PATIENCE_S, PATIENCE, StepWatch
from pagebus.bus.messages import BlockPull, StepPlan


class World:
    def __init__(self) -> None:
        self.now_s, self.num_steps = 1000.0, 0
        self.watch = StepWatch(lambda: self.now_s)

    def submitted(self, *pulls: int, epoch: int = 1) -> None:
        """One more step, whose plan has these pulls."""
        self.num_steps += 1
        orders = tuple(BlockPull(pull=pull, address="", num_blocks=1) for pull in pulls)
        self.watch.submitted(StepPlan(step=self.num_steps, planned_s=0.0, num_decodes=0, pulls=orders), epoch)

    def after(self, seconds: float) -> StepWatch:
        self.now_s += seconds
        return self.watch


def test_idle_is_not_stalled():
    """Nothing to do, and nothing done for as long as one likes."""
    world = World()
    assert world.after(1e6).stalled_s == 0
    world.submitted()
    world.after(0.1).done()
    assert world.after(1e6).stalled_s == 0


def test_a_step_that_never_ends():
    """It is stalled after a while, and no longer once a result has come."""
    world = World()
    world.submitted()
    world.submitted()
    assert world.after(LEAST_PATIENCE_S).stalled_s == 0
    assert world.after(1).stalled_s == LEAST_PATIENCE_S + 1
    world.watch.done()
    assert world.watch.stalled_s == 0
    assert world.after(1e6).stalled_s == 1e6


def test_long_steps_earn_patience():
    """Where steps are long, they may be."""
    world = World()
    world.submitted()
    world.after(20).done()
    world.submitted()
    assert world.after(20 * PATIENCE).stalled_s == 0
    assert world.after(1).stalled_s == 20 * PATIENCE + 1


def test_the_wait_begins_with_the_work():
    """Time without work does not count."""
    world = World()
    world.submitted()
    world.after(1).done()
    world.after(1e6)
    world.submitted()
    assert world.after(LEAST_PATIENCE_S).stalled_s == 0


def test_what_hangs_is_named():
    """The oldest step without a result."""
    world = World()
    world.submitted()
    world.submitted()
    world.submitted()
    world.after(1).done()
    assert world.after(300).problem(300) == ""
    assert world.after(5).problem(300) == "step 2 has not been computed for 305 s"


def test_a_pull_that_never_ends():
    """Other pulls and steps do not count for it. It is over once it is reported, or another scheduler plans."""
    world = World()
    world.submitted(1, 2)
    world.after(200).done()
    world.submitted(3)
    world.watch.done()
    world.watch.pulled(2)
    world.watch.pulled(3)
    assert world.after(100).problem(300) == ""
    assert world.after(1).problem(300) == "blocks of another executor have been on their way for 301 s"
    world.watch.pulled(1)
    assert world.after(1e6).problem(300) == ""
    world.submitted(4)
    world.submitted(1, epoch=2)
    world.watch.done()
    world.watch.done()
    world.watch.pulled(1)
    assert world.after(1e6).problem(300) == ""
