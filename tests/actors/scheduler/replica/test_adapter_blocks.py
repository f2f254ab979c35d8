"""Adapters as owners of blocks: a block is free, or held by sequences, or by one adapter; and whoever computes with an
adapter finds all of it where it was put, whatever was evicted meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from msgspec import structs

from pagebus.actors.model.block_hash import hash_blocks, hashes_to_array
from pagebus.actors.scheduler.events import CachesReset, ReplicaJoined
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.service.snapshot import Snapshot
from pagebus.bus.messages import (
    AbortRequest,
    AdapterRead,
    AdapterSource,
    BlockRequested,
    StateRequested,
    StepPlan,
    TokenizedRequest,
)
from tests.actors.scheduler.fake_executor import FakeExecutor, Slot
from tests.actors.scheduler.world import World, prompt, request

SIZES = {"small": 1, "middle": 3, "large": 6, "other": 4, "none": 0}
"""Blocks of each adapter."""


@dataclass
class Adapting(FakeExecutor):
    """Holds adapters, and checks that they lie in their blocks when somebody computes with them."""

    max_loras: int = 2
    most_loras: int = 3
    wanted: list[AdapterRead] = field(default_factory=list)
    """What it has to say."""
    placed: dict[str, list[int]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    num_placed: int = 0

    @property
    def joined(self) -> ReplicaJoined:
        return replace(super().joined, max_loras=self.max_loras, most_loras=self.most_loras)

    def _copy(self, plan: StepPlan) -> None:
        super()._copy(plan)
        for digest in plan.dropped_adapters:
            self.held.discard(digest)
            self.placed.pop(digest, None)
        for source in plan.loaded_adapters:
            self.held.add(source.digest)
            assert len(self.held) <= self.most_loras
            self.wanted.append(
                AdapterRead(
                    replica=self.name, executor_epoch=self.epoch, scheduler_epoch=self.scheduler_epoch, step=plan.step,
                    digest=source.digest, num_blocks=_size(source.digest),
                )
            )  # fmt: skip
        blocks = plan.adapter_blocks.tolist()
        taken = {block for slot, each in self.slots.items() if slot not in plan.freed_slots.tolist()
                 for block in self._seen(each)}  # fmt: skip
        for each in plan.placed_adapters:
            assert each.digest in self.held, "an adapter is placed that was dropped"
            assert each.num_blocks == _size(each.digest)
            mine = self.placed[each.digest] = blocks[: each.num_blocks]
            assert not taken & set(mine), "an adapter comes into a block that a sequence has"
            for page, block in enumerate(mine):
                self.cache[block] = _content(each.digest, page)
            del blocks[: each.num_blocks]
            self.num_placed += 1
        assert not blocks

    def _row(self, slot: int, count: int, seen: dict[int, set[int | None]]) -> tuple[Slot, range]:
        digest = self.slots[slot].new.adapter
        for page, block in enumerate(self.placed[digest] if digest else ()):
            assert (self.cache[block] == _content(digest, page)).all(), f"page {page} of {digest} is gone"
        return super()._row(slot, count, seen)


def _digest(name: str) -> str:
    return name.encode().hex()


def _size(digest: str) -> int:
    return SIZES[bytes.fromhex(digest).decode()]


def _content(digest: str, page: int) -> int:
    return sum(map(ord, digest)) * 1000 + page


def adapted(name: str, adapter: str, length: int, max_tokens: int) -> TokenizedRequest:
    plain = request(name, prompt(length, seed=length % 3), max_tokens=max_tokens)
    if not adapter:
        return plain
    source = AdapterSource(name=adapter, path=f"/{adapter}", digest=_digest(adapter))
    hashes = hashes_to_array(hash_blocks(plain.prompt_token_ids, 4, adapter=source.digest))
    return structs.replace(plain, adapter=source, block_hashes=hashes)


def only(world: World) -> Replica:
    (replica,) = world.core.replicas.values()
    return replica


def settle(world: World, executor: Adapting) -> None:
    """Until nothing is in flight, and everything wanted has been read."""
    world.run()
    while executor.wanted:
        world.send(executor.wanted.pop(0))
        world.run()


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules(seed: int) -> None:
    """Requests with five adapters and none, for few blocks, with swaps, aborts, and caches that are emptied. After
    every event the core checks its blocks, and the executor those that it computes with."""
    draw = random.Random(seed)
    world = World(epoch=1, preemption_mode=draw.choice(["swap", "recompute"]), enable_prefix_caching=seed % 3 > 0)
    executor = Adapting(
        num_blocks=draw.choice([14, 18, 30]), num_host_blocks=draw.choice([0, 12]), max_num_seqs=draw.choice([2, 5]),
        max_loras=draw.choice([1, 2, 4]), most_loras=draw.choice([2, 3, 9]), max_model_len=32, budget=16,
    )  # fmt: skip
    executor.most_loras = max(executor.max_loras, executor.most_loras)
    world.join(executor)
    for number in range(40):
        world.send(adapted(f"{number}", draw.choice([*SIZES, ""]), draw.randrange(1, 16), draw.randrange(1, 14)))
        for _ in range(draw.randrange(4)):
            if executor.queue:
                world.step(executor.name)
            elif executor.wanted:
                world.send(executor.wanted.pop(draw.randrange(len(executor.wanted))))
        if draw.random() < 0.1:
            world.send(AbortRequest(request_id=f"{draw.randrange(number + 1)}"))
        if draw.random() < 0.05:
            world.send(CachesReset())
    settle(world, executor)
    world.check_end()
    assert not world.failed
    assert executor.num_placed >= len(SIZES)
    assert world.core.leftovers()["gpu-0: blocks"] == 0


def test_the_page_is_told_whose_blocks_they_are() -> None:
    """Of those in use and of those that nobody has, which are free and not shown as cached."""
    world = World(epoch=1)
    executor = Adapting(num_blocks=24, max_model_len=48)
    world.join(executor)
    for name in ("middle", "other"):
        world.send(adapted(name, name, 5, 2))
        settle(world, executor)
    world.send(adapted("runs", "other", 5, 8))
    snapshot, replica = Snapshot(world.core), only(world)
    state = snapshot.build(StateRequested(ingress="web", serial=1), world.now_s)
    shown = state.replicas[0]
    assert (shown.adapters, shown.num_adapter_blocks) == (("middle", "other"), 7)
    assert (shown.num_free, replica.adapters.num_held) == (24 - 4 - 2, 4)
    of_adapters = dict(replica.adapters.resident)
    assert state.adapter_blocks.tolist() == of_adapters["middle"] + of_adapters["other"]
    assert not set(state.adapter_blocks.tolist()) & {*state.cached_blocks.tolist(), *state.blocks.tolist()}
    block = of_adapters["middle"][1]
    told = snapshot.block(BlockRequested(ingress="web", serial=2, replica="gpu-0", block=block))
    assert (told.adapter, told.place, told.table.tolist()) == ("middle", 1, of_adapters["middle"])


def test_idle_adapters_go_by_age_like_cached_blocks() -> None:
    """Two idle ones stay on the device until their blocks are needed; the older one goes, as a whole, and comes back
    without being read again."""
    world = World(epoch=1)
    executor = Adapting(num_blocks=16, max_model_len=48, most_loras=5)
    world.join(executor)
    for name in ("middle", "other"):
        world.send(adapted(name, name, 5, 2))
        settle(world, executor)
    found = only(world).adapters.resident
    assert [name for name, _ in found] == ["middle", "other"]
    assert only(world).pool.num_free == 16, "nobody has them"

    world.send(adapted("again", "middle", 5, 2))
    settle(world, executor)
    assert executor.num_placed == 2, "it was still there"

    world.send(request("long", prompt(36), max_tokens=8))
    settle(world, executor)
    assert [name for name, _ in only(world).adapters.resident] == ["middle"], "the one used longest ago is gone"
    world.send(adapted("back", "other", 5, 2))
    settle(world, executor)
    assert executor.num_placed == 3
    assert [len(plan.loaded_adapters) for plan in executor.plans if plan.loaded_adapters] == [1, 1]
    world.check_end()


def test_a_request_that_fits_only_without_its_adapter_fails() -> None:
    """As soon as it is known how large the adapter is."""
    world = World(epoch=1)
    executor = Adapting(num_blocks=8, max_model_len=32)
    world.join(executor)
    world.send(
        adapted("fits", "large", 5, 2), adapted("fails", "large", 12, 12), request("plain", prompt(12), max_tokens=12)
    )
    settle(world, executor)
    assert list(world.failed) == ["fails"]
    assert "with the adapter" in world.failed["fails"].message
    world.check_end()


def test_who_waits_for_an_adapter_that_cannot_be_read_fails_once() -> None:
    """With the reason. Others go on, and reports of another life are not believed."""
    world = World(epoch=1)
    executor = Adapting(num_blocks=24, max_model_len=48)
    world.join(executor)
    world.send(adapted("a", "large", 5, 4), adapted("b", "large", 6, 4), adapted("good", "middle", 5, 4))
    world.run()
    reads = {each.digest: each for each in executor.wanted}
    failed = structs.replace(reads[_digest("large")], error="no such file")
    world.send(structs.replace(failed, executor_epoch=1), structs.replace(failed, scheduler_epoch=0))
    assert not world.failed
    world.send(failed, reads[_digest("middle")])
    world.run()
    assert {name: each.status for name, each in world.failed.items()} == {"a": 500, "b": 500}
    assert all("no such file" in each.message for each in world.failed.values())
    world.check_end()


def test_a_plan_names_no_placement_that_was_evicted_before_it() -> None:
    """A sequence leaves before any plan has said where its adapter comes to, and others take the blocks."""
    world = World(epoch=1)
    executor = Adapting(num_blocks=12, max_model_len=44)
    world.join(executor)
    world.send(adapted("first", "large", 5, 2))
    settle(world, executor)
    replica = only(world)
    replica.adapters.use(_digest("large"))
    replica.adapters.leave(_digest("large"))
    assert replica.pool.allocate(12)
    assert not replica.adapters.columns()
    assert not replica.adapters.resident
    assert np.all([replica.index.hash_of(block) is None for block in range(12)])
