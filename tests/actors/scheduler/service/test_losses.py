"""A request that ends every executor computing it: it is found, alone, and given up; others are not."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.request import MOST_LOSSES
from tests.actors.scheduler.world import World, request


def poisoned(world: World, name: str) -> bool:
    """Whether the next plan of the executor computes the request."""
    sequences = {each for each, heard in world.heard.items() if heard.started.request_id == name}
    executor = world.executors["executor-0"]
    running = {new.sequence_id for plan in executor.plans for new in plan.new_sequences}
    return bool(executor.queue) and bool(sequences & running) and name not in world.failed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_poisonous_request_is_given_up_alone(depth: int, place: int) -> None:
    """It gets a 500 after a few executors; all requests beside it get their answers."""
    world = World(pipeline_depth=depth)
    names = [f"good{i}" for i in range(8)]
    names[place] = "poison"
    world.send(*(request(name, [i, i + 1, i + 2], max_tokens=6) for i, name in enumerate(names)))
    kills = 0
    world.join(name="executor-0", max_num_seqs=8)
    while world.core.requests:
        if poisoned(world, "poison"):
            world.kill("executor-0")
            kills += 1
            assert kills <= MOST_LOSSES + 2
            world.join(name="executor-0", max_num_seqs=8)
        else:
            world.step()
    world.run()

    assert list(world.failed) == ["poison"]
    assert world.failed["poison"].status == 500
    assert world.given_up == ["poison"]
    world.check_end()


def test_who_makes_progress_is_no_suspect() -> None:
    """However often executors are lost under it."""
    world = World()
    world.send(request("a", [1, 2, 3], max_tokens=10 * MOST_LOSSES))
    for _ in range(3 * MOST_LOSSES):
        world.join(name="executor-0")
        for _ in range(3):
            world.step()
        world.kill("executor-0")
    world.join(name="executor-0")
    world.run()
    world.check_end()
    assert not world.failed
