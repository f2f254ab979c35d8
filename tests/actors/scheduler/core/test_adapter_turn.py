"""Many adapters that are named at once: how many steps requests take, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from msgspec import structs

from pagebus.actors.model.block_hash import hash_blocks, hashes_to_array
from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.bus.messages import AdapterRead, AdapterSource, StepPlan, TokenizedRequest
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, prompt, request

REGISTERED, REQUESTS, ROWS, OUTPUT = 1000, 96, 32, 8
WAITING = 300


@dataclass
class Reading(FakeExecutor):
    """Reads adapters, each of one block, and says so when :attr:`wanted` is sent."""

    max_loras: int = 2
    wanted: list[AdapterRead] = field(default_factory=list)

    @property
    def joined(self) -> ReplicaJoined:
        return replace(super().joined, max_loras=self.max_loras, most_loras=REGISTERED)

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.wanted += [
            AdapterRead(
                replica=self.name, executor_epoch=self.epoch, scheduler_epoch=1, step=plan.step, digest=source.digest,
                num_blocks=1,
            )
            for source in plan.loaded_adapters
        ]  # fmt: skip

    def read(self, world: World) -> None:
        """All that is wanted."""
        wanted, self.wanted = self.wanted, []
        world.send(*wanted)

    def num_entered(self, adapter: str) -> int:
        """Sequences with an adapter that got a slot."""
        return sum(new.adapter == digest_of(adapter) for plan in self.plans for new in plan.new_sequences)


def digest_of(adapter: str) -> str:
    return adapter.encode().hex().zfill(32)


def adapted(name: str, adapter: str, max_tokens: int) -> TokenizedRequest:
    source = AdapterSource(name=adapter, path=f"/{adapter}", digest=digest_of(adapter))
    plain = request(name, prompt(4), max_tokens=max_tokens)
    hashes = hashes_to_array(hash_blocks(plain.prompt_token_ids, 4, adapter=source.digest))
    return structs.replace(plain, adapter=source, block_hashes=hashes)


def finish(world: World, executor: Reading) -> int:
    """Until all is done; the steps that computed anything."""
    world.run()
    while executor.wanted:
        executor.read(world)
        world.run()
    world.check_end()
    return sum(bool(len(plan.slots)) for plan in executor.plans)


def steps_of(names: list[str], places: int) -> int:
    """For requests that name these adapters, all of which come at once."""
    world = World(epoch=1, enable_prefix_caching=False)
    executor = Reading(num_blocks=512, max_num_seqs=ROWS, max_loras=places, budget=64)
    world.join(executor)
    for number, name in enumerate(sorted(set(names))):  # they are read before, so that all that counts is their turn
        world.send(adapted(f"first-{number}", name, 1))
    before = finish(world, executor)
    world.send(*[adapted(f"{number}", name, OUTPUT) for number, name in enumerate(names)])
    return finish(world, executor) - before


@pytest.mark.parametrize("seed", range(3))
def test_a_place_for_each_row_costs_no_steps(seed: int) -> None:
    """Requests name adapters as Zipf's law says. With as many places as rows it does not matter how many there are.
    With fewer, those that are named once take turns, and nobody waits for more turns than that takes."""
    shares = 1 / np.arange(1, REGISTERED + 1)
    drawn = np.random.default_rng(seed).choice(REGISTERED, REQUESTS, p=shares / shares.sum())
    names, places = [f"{number}" for number in drawn.tolist()], 8
    alone = steps_of(["one"] * REQUESTS, 1)
    assert steps_of(names, ROWS) == alone
    turns = -(-len(set(names)) // places)
    assert alone < steps_of(names, places) <= alone + turns * (OUTPUT + 2)


@pytest.mark.parametrize("known", [False, True])
def test_those_whose_adapter_has_a_place_overtake(*, known: bool) -> None:
    """However many wait in front of them, and whether their adapters are being read or wait for a place. The adapter
    whose turn ends first gets no more sequences: its place is for those who wait."""
    world = World(epoch=1)
    executor = Reading(num_blocks=512, max_num_seqs=8)
    world.join(executor)
    world.send(*[adapted(name, name, max_tokens) for name, max_tokens in (("long", 40), ("short", 20))])
    executor.read(world)
    world.send(*[adapted(f"waits-{number}", f"other-{number}", 2) for number in range(WAITING)])
    while not executor.wanted:
        world.step(executor.name)
    if known:
        executor.read(world)
    world.send(adapted("short-2", "short", 2), adapted("long-2", "long", 2))
    for _ in range(4):
        world.step(executor.name)
    assert executor.num_entered("long") == 2
    assert executor.num_entered("short") == (1 if known else 2), "as long as others are read, nobody wants its place"
