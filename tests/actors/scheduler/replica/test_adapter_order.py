"""Rows with the same adapter are neighbours in a plan: executors multiply neighbours together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from msgspec import structs

from pagebus.actors.model.block_hash import hash_blocks, hashes_to_array
from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.scheduler.replica.token_budget import by_adapter
from pagebus.bus.messages import AdapterRead, AdapterSource, TokenizedRequest
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, prompt, request


@dataclass
class Adapting(FakeExecutor):
    """Takes adapters, which change nothing."""

    @property
    def joined(self) -> ReplicaJoined:
        return replace(super().joined, max_loras=3)


def adapted(name: str, adapter: str) -> TokenizedRequest:
    tokens = np.array(prompt(5, seed=sum(map(ord, name))), np.int32)
    hashes = hashes_to_array(hash_blocks(tokens, 4, adapter=adapter))
    source = AdapterSource(name=adapter, path=f"/{adapter}", digest=adapter)
    plain = request(name, tokens.tolist(), max_tokens=8)
    return structs.replace(plain, adapter=source, block_hashes=hashes)


def test_only_what_has_adapters_is_moved() -> None:
    """Decodes and others each for themselves, and in the order in which they came otherwise."""
    slots, counts = np.array([5, 2, 7, 1, 0, 3, 4]), np.array([1, 1, 1, 1, 9, 8, 7], np.int32)
    numbers = np.array([40, 30, 0, 30, 40, 0, 0, 30])

    found, tokens, num_decodes = by_adapter(numbers, (slots, counts, 4))

    assert found.tolist() == [5, 2, 7, 1, 3, 0, 4]
    assert tokens.tolist() == [1, 1, 1, 1, 8, 9, 7]
    assert num_decodes == 4
    assert by_adapter(np.zeros(8, np.int64), (slots, counts, 4))[0] is slots


def load(world: World, executor: FakeExecutor, adapter: str) -> None:
    """Have one request with the adapter, so that it is there."""
    world.send(adapted(f"first {adapter}", adapter))
    (step,) = [plan.step for plan in executor.plans if any(each.digest == adapter for each in plan.loaded_adapters)]
    read = AdapterRead(
        replica=executor.name, executor_epoch=executor.epoch, scheduler_epoch=1, step=step, digest=adapter
    )
    world.send(read)
    world.run()


def test_requests_by_turns_are_neighbours() -> None:
    """Three adapters and none; the tokens are those of each request alone."""
    world = World(epoch=1)
    executor = world.join(Adapting(max_num_seqs=8))
    names = ["0a", "0b", "0c", ""]
    for adapter in names[:3]:
        load(world, executor, adapter)
    for number in range(8):
        adapter = names[number % 4]
        plain = request(f"{number}", prompt(5, seed=number), max_tokens=8)
        world.send(adapted(f"{number}", adapter) if adapter else plain)
    world.run()
    world.check_end()

    of_slot: dict[int, str] = {}
    most = 0
    for plan in executor.plans:
        of_slot |= {new.slot: new.adapter for new in plan.new_sequences}
        for rows in (plan.slots[: plan.num_decodes], plan.slots[plan.num_decodes :]):
            order = [of_slot[slot] for slot in rows.tolist()]
            runs = sum(one != two for one, two in pairwise(order)) + bool(order)
            assert runs == len(set(order))
            most = max(most, len(order))
    assert most == 8
