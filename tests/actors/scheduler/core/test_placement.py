"""The choice of a replica is what asking every replica would give."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from pagebus.actors.scheduler.core.placement import choose
from pagebus.actors.scheduler.replica.prefix_match import Offer, offer_of
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence
from tests.actors.scheduler.world import World, request


def ask_all(sequence: Sequence, replicas: list[Replica]) -> tuple[Replica, Offer] | None:
    """The definition: the least load less what is saved, the first of equals."""
    best: tuple[Replica, Offer] | None = None
    least = 0
    for replica in replicas:
        offer = offer_of(replica, sequence)
        if offer is None:
            continue
        cost = replica.load(sequence.request.priority_class) - offer.saved_tokens
        if best is None or cost < least:
            best, least = (replica, offer), cost
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_that_of_asking_all(seed: int) -> None:
    """Any loads, caches and tiers, full replicas among them, prompts that share prefixes of any length."""
    rng = random.Random(seed)
    world = World(preemption_mode="swap", pipeline_depth=rng.choice([1, 2]))
    for number in range(6):
        sizes = {"num_blocks": rng.choice([24, 40]), "max_num_seqs": rng.choice([2, 4]), "budget": rng.choice([16, 64])}
        world.join(name=f"gpu-{number}", epoch=number + 1, **sizes)
    heads = [[rng.randrange(9) for _ in range(24)] for _ in range(3)]
    asked = found = 0
    for number in range(80):
        tail = [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        prompt = heads[min(rng.randrange(4), 2)][: rng.randrange(8, 25)] + tail
        name = f"r{number}"
        world.requests[name] = request(name, prompt, max_tokens=rng.randrange(1, 12), n=rng.choice([1, 1, 2]))
        world.core.handle(world.requests[name])
        fleet = world.core.planner.fleet
        fleet.refresh()
        for sequence in world.core.waiting:
            able = fleet.open[sequence.request.priority_class] & fleet.can_hold(sequence)
            replicas = [replica for row, replica in enumerate(fleet.replicas) if able[row]]
            chosen, expected = choose(sequence, fleet, able, world.core.planner.pulls), ask_all(sequence, replicas)
            assert chosen == expected
            asked += 1
            found += expected is not None and expected[1].num_tokens > 0
        world.send()
        for _ in range(rng.randrange(4)):
            if any(executor.queue for executor in world.executors.values()):
                world.step()
    world.run()
    world.check_end()
    assert asked >= 80
    assert found > 0


def test_a_job_that_made_room_runs_elsewhere_at_once() -> None:
    """It had a slot beside steps in flight and was in none of them; another replica has room for it."""
    world = World()
    world.join(name="gpu-1", num_blocks=12)
    world.send(request("streamed", [1, 2], max_tokens=20))
    world.send(structs.replace(request("job", [3] * 8, max_tokens=4), is_job=True))
    world.join(name="gpu-0", epoch=2, num_blocks=6)
    world.send(request("long", [4] * 36, max_tokens=4))
    placed = {each.request.id: each.replica for each in world.core.planner.placed()}
    assert placed == {"streamed": "gpu-1", "long": "gpu-1", "job": "gpu-0"}
    world.run()
    world.check_end()
