"""An operator holds the work and empties caches: at any time, and everything still ends with its tokens."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from pagebus.actors.scheduler.events import CachesReset, WorkHeld
from pagebus.bus.messages import HOLD_ABORT, HOLD_KEEP, HOLD_NONE, HOLD_WAIT, RequestFailed
from tests.actors.scheduler.world import World, prompt, request


def job(name: str, seed: int, **sampling: int) -> object:
    return structs.replace(request(name, prompt(9, seed), **sampling), is_job=True)


def test_work_that_is_kept() -> None:
    """Steps in flight come to their end, then nothing is planned; what comes waits, and all goes on afterwards."""
    world = World()
    world.join()
    world.send(request("a", prompt(9), max_tokens=12))
    world.step()
    world.send(WorkHeld(HOLD_KEEP))
    world.run()
    assert world.core.at_rest
    num_plans = len(world.plans)
    world.send(request("b", prompt(9, 1), max_tokens=3))
    assert (len(world.plans), len(world.core.requests), world.failed) == (num_plans, 2, {})

    world.send(WorkHeld(HOLD_NONE))
    world.run()
    world.check_end()
    assert not world.core.at_rest


def test_work_that_comes_to_its_end() -> None:
    """What is there ends as it would have; what comes is refused, but for jobs, which stand still then."""
    world = World()
    world.join()
    world.send(request("a", prompt(9), max_tokens=6))
    world.send(WorkHeld(HOLD_WAIT))
    assert not world.core.at_rest
    world.send(request("b", prompt(9, 1), max_tokens=3), job("c", 2, max_tokens=20))
    world.run()
    assert world.core.at_rest
    assert {name: failure.status for name, failure in world.failed.items()} == {"b": 503}
    assert list(world.core.requests) == ["c"]

    world.send(WorkHeld(HOLD_NONE))
    world.run()
    world.check_end()


def test_work_that_is_ended() -> None:
    """Clients are told that they may come again; jobs stand still."""
    world = World()
    world.join()
    world.send(request("a", prompt(9), max_tokens=6), job("b", 1, max_tokens=6))
    world.step()
    world.send(WorkHeld(HOLD_ABORT))
    world.run()
    assert world.core.at_rest
    told = world.failed["a"]
    assert isinstance(told, RequestFailed)
    assert (told.status, "paused" in told.message) == (503, True)
    assert list(world.core.requests) == ["b"]
    world.send(WorkHeld(HOLD_NONE))
    world.run()
    world.requests.pop("a")  # what it had is not its whole answer
    world.heard = {key: heard for key, heard in world.heard.items() if heard.started.request_id != "a"}
    world.check_end()


@pytest.mark.parametrize("host", [False, True])
def test_caches_are_emptied(host: bool) -> None:
    """A prompt that was found before is computed again, unless it lies in the host tier, which is asked for alone."""
    world = World(preemption_mode="swap")
    executor = world.join(num_blocks=12, num_host_blocks=40, max_num_seqs=4)
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):  # those before are pushed out to the host
        world.send(request(name, prompt(24, seed), max_tokens=2))
        world.run()
    replica = world.core.replicas["gpu-0"]
    assert replica.host_tier.pool.usage > 0
    world.send(CachesReset(host=host))
    assert len(replica.index) == 0
    assert (replica.host_tier.pool.usage == 0) == host
    before = executor.num_computed
    world.send(request("d", prompt(24, 0), max_tokens=2))
    world.run()
    found = executor.num_computed - before < 24
    assert found == (not host)
    world.check_end()


def test_what_runs_is_computed_anew() -> None:
    """From its first token, and with the same ones."""
    world = World()
    executor = world.join()
    world.send(request("a", prompt(9), max_tokens=12), request("b", prompt(9), max_tokens=5, beam_width=2, n=2))
    for _ in range(4):
        world.step()
    before = executor.num_computed
    world.send(CachesReset(running=True))
    world.run()
    world.check_end()
    assert executor.num_computed - before > 12 + 9


@pytest.mark.parametrize("seed", range(40))
def test_at_any_time(seed: int) -> None:
    """Held, let go and emptied at random moments, with preemptions, both tiers and beams."""
    rng = random.Random(seed)
    world = World(preemption_mode=rng.choice(["swap", "recompute"]), pipeline_depth=rng.choice([1, 2, 4]))
    world.join(num_blocks=14, num_host_blocks=20, max_num_seqs=4)
    waiting = [request(f"r{i}", prompt(rng.randrange(1, 20), i % 3), max_tokens=rng.randrange(1, 12),
                       **rng.choice([{}, {"n": 2}, {"n": 2, "beam_width": 2}])) for i in range(12)]  # fmt: skip
    while waiting or world.core.requests:
        match rng.randrange(6):
            case 0 if waiting:
                world.send(waiting.pop())
            case 1:
                world.send(WorkHeld(rng.choice([HOLD_NONE, HOLD_KEEP])))
            case 2:
                world.send(CachesReset(host=rng.random() < 0.5, running=rng.random() < 0.3))
            case _ if any(executor.queue for executor in world.executors.values()):
                world.step()
            case _:
                world.send(WorkHeld(HOLD_NONE))
    world.send(WorkHeld(HOLD_NONE))  # what has ended while it stood still is freed now
    world.run()
    world.check_end()


def test_most_tokens_of_a_step() -> None:
    """A scheduler may give steps fewer tokens than an executor takes, never more."""
    for most, expected in ((6, 6), (None, 16), (100, 16)):
        world = World(max_num_scheduled_tokens=most)
        world.join(budget=16)
        world.send(request("a", prompt(40), max_tokens=3))
        world.run()
        world.check_end()
        assert max(int(plan.num_scheduled.sum()) for _, plan in world.plans) == expected
