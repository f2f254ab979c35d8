"""Many sequences that move at once: the first are pulled while the others are decided."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.core import planner
from pagebus.actors.scheduler.events import ReplicaSuspended
from pagebus.actors.scheduler.moves import pulls
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.moves.fake_pulls import FakePulls, Lenders
from tests.actors.scheduler.moves.splits import split_often
from tests.actors.scheduler.moves.test_roles import LEFT, Split
from tests.actors.scheduler.world import World, prompt, request

MOVED = 6
OPTIONS = {"max_num_seqs": MOVED, "num_blocks": 200, "copy_tokens": 0.1}


@pytest.mark.parametrize(("depth", "planned"), [(4, [1, 2, 3]), (2, [1, 2])])
def test_the_first_of_many_pulls_go_out_first(monkeypatch: pytest.MonkeyPatch, depth: int, planned: list[int]) -> None:
    """In plans without rows, as far as the pipeline has room: one pull, two, then the rest. Each is as large as pulls
    are to be, and all tokens are right."""
    monkeypatch.setattr(planner, "FIRST_PULLS", 1)
    world, lenders = World(pipeline_depth=depth), Lenders()

    def join(name: str, epoch: int) -> FakeExecutor:
        return world.join(name=name, epoch=epoch, pulls=FakePulls(kind="alike", lenders=lenders), **OPTIONS)

    join("gpu-0", 2)
    for number in range(MOVED):
        world.send(request(f"r{number}", prompt(40, seed=number), max_tokens=20))
    for _ in range(MOVED):
        world.step("gpu-0")
    target = join("gpu-1", 3)
    lender, taker = (world.core.replicas[name] for name in ("gpu-0", "gpu-1"))
    world.core.planner.pulls.link(lender, taker).ended(0, there=True, bytes_per_s=1e6)
    monkeypatch.setattr(pulls, "MOST_BYTES", 12 * taker.block_bytes)
    world.send(ReplicaSuspended("gpu-0", drains=True))
    while not target.queue:
        world.step("gpu-0")
    assert [len(plan.pulls) for plan in target.queue] == planned
    world.run()
    world.check_end()
    assert taker.moves.num_failed == 0
    assert taker.moves.num_pulled >= 9 * MOVED


def test_sequences_that_leave_a_prefill_replica_together_are_pulled_with_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though each makes a pull that is as large as pulls are to be: every plan takes a place in the pipeline."""
    split_often(monkeypatch, 24, 4)
    split = Split(budget=200, num_blocks=200)
    monkeypatch.setattr(pulls, "MOST_BYTES", 12 * split.world.core.replicas["gpu-1"].block_bytes)
    split.world.send(*(request(f"r{number}", prompt(40, seed=number + 1), max_tokens=LEFT) for number in range(3)))
    while split.world.executors["gpu-0"].queue:
        split.world.step("gpu-0")
    ordered = [len(plan.pulls) for name, plan in split.world.plans if name == "gpu-1" and plan.pulls]
    assert ordered == [3]
    split.end()
