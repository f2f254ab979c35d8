"""Replicas that join, fail and come back, and which of them a request goes to, as the core decides it."""

from __future__ import annotations

import pytest
from msgspec import structs

from pagebus.actors.scheduler.events import (
    ProtocolError,
    ReplicaJoined,
    ReplicaResult,
    ReplicaSuspended,
)
from pagebus.bus.messages import AbortRequest
from tests.actors.scheduler.world import World, prompt, request


def test_a_lost_replica_s_sequences_go_on_elsewhere() -> None:
    """Tokens without results are sampled again; indexes and sequence ids go on."""
    world = World()
    world.join(name="gpu-0")
    for i in range(4):
        world.send(request(f"r{i}", prompt(9, i), max_tokens=30))
    for _ in range(7):
        world.step("gpu-0")
    world.join(name="gpu-1", epoch=9)
    world.kill("gpu-0")
    world.run()
    world.check_end()
    assert len(world.heard) == 4


def test_a_replica_that_comes_back_goes_on_with_its_step_numbers() -> None:
    """The steps stream of a replica has one writer with growing indexes, whatever happens to the executor."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=9))
    world.step()
    world.kill("gpu-0")
    last = world.plans[-1][1].step
    world.join(epoch=5)
    assert world.plans[-2][1].step == last + 1
    world.run()
    world.check_end()


def test_a_suspended_replica_gets_no_plan_but_its_results_count() -> None:
    """A draining executor finishes what it has; its tokens are kept when the rest moves."""
    world = World()
    executor = world.join()
    world.send(request("a", prompt(4), max_tokens=9))
    world.send(ReplicaSuspended("gpu-0"))
    world.step()
    world.step()
    assert not executor.queue
    world.kill("gpu-0")
    world.join(name="gpu-1")
    world.run()
    world.check_end()
    assert world.plans[-1][0] == "gpu-1"


def test_placement_prefers_the_cached_prefix_then_the_load() -> None:
    """Equal load: where the prefix is. No prefix: where less runs."""
    world = World()
    world.join(name="gpu-0", max_num_seqs=4)
    world.send(request("a", prompt(40), max_tokens=1))
    world.run()
    world.join(name="gpu-1", max_num_seqs=4)
    world.send(request("b", prompt(40), max_tokens=8))
    world.send(request("c", prompt(40, 3), max_tokens=8))
    world.send(request("d", prompt(40, 5), max_tokens=1))
    where = {
        next(h.started.request_id for i, h in world.heard.items() if i == new.sequence_id): replica
        for replica, plan in world.plans
        for new in plan.new_sequences
    }
    assert (where["b"], where["c"]) == ("gpu-0", "gpu-1")
    world.run()
    world.check_end()


def test_false_results_are_refused_without_a_trace() -> None:
    """A replica that answers another step, or with other rows, is not believed."""

    world = World()
    executor = world.join()
    world.send(request("a", prompt(4), max_tokens=9))
    result = executor.run_one()
    for false in (
        structs.replace(result, step=2),
        structs.replace(result, token_indexes=result.token_indexes + 1),
        structs.replace(result, sequence_ids=result.sequence_ids + 1),
        structs.replace(result, sequence_ids=result.sequence_ids[:0]),
    ):
        with pytest.raises(ProtocolError):
            world.core.handle(ReplicaResult("gpu-0", false))
        world.core.check_integrity()
    world._listen(result)
    world.send(ReplicaResult("gpu-0", result))
    world.send(ReplicaResult("gpu-0", result))
    world.run()
    world.check_end()


def test_a_replica_of_another_block_size_cannot_join() -> None:
    """Its blocks could not be found by the deployment's hashes."""
    world = World()
    wrong = ReplicaJoined(
        replica="x", epoch=1, num_blocks=9, block_size=8, max_num_seqs=1, max_model_len=9, max_num_batched_tokens=9
    )
    with pytest.raises(ValueError, match="block size"):
        world.core.handle(wrong)


def test_idle_is_neither_waiting_nor_in_flight() -> None:
    """A request that waits for a replica is work, and so is a step whose only request has been aborted."""
    world = World()
    world.send(request("a", prompt(5), max_tokens=8))
    assert not world.core.is_idle
    world.join()
    world.send(AbortRequest(request_id="a"))
    assert not world.core.requests
    assert not world.core.is_idle
    world.run()
    assert world.core.is_idle
