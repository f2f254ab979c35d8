"""Ranks as actors on the memory bus: they form a group, compute together, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.executor import rank_actors
from pagebus.actors.executor.actor import ExecutorActor
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.rank_actors import FollowingRank, LeadingRank
from pagebus.actors.executor.ranks.group import Record, record_state
from pagebus.actors.model.config import ModelError
from pagebus.actors.model.spec import Moe
from pagebus.actors.runtime.process import actor_class
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import FENCE_INDEX, START, EntryId, LeaseInfo, LogEntry
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import SLEEP_STATE, ReplicaFenced, StepPlan, StepResult
from pagebus.bus.streams import Names
from tests.actors.executor.models.test_families import reference_tokens
from tests.helpers.engine_driver import scheduler_for
from tests.helpers.model_factory import make_golden, make_model, reference_generate
from tests.helpers.waiting import LIMIT_S

NAME = "executor-0"
STEPS, RESULTS = Names().steps(NAME), Names().results(NAME)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, "llama2", seed=21, num_attention_heads=4, num_key_value_heads=2)


class Group:
    """The ranks of one replica on a bus, and the scheduler's side of that bus."""

    def __init__(self, folder: Path, world: int = 2, **settings: Any) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.settings = Settings(
            model=str(folder), device="cpu", threads=1, max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=20,
            swap_space=0.001, lease_ttl_s=1.0, tensor_parallel_size=world, actor_name=NAME, **settings,
        )  # fmt: skip
        self.actors: list[ExecutorActor] = []
        self.running: list[asyncio.Task[None]] = []
        self.position = START

    def start(self, rank: int, **changes: Any) -> None:
        """Start a rank, with other settings perhaps."""
        own = self.settings.replace(rank=rank, **changes)
        actor = actor_class("executor", own)(own, MemoryBus(self.server), NAME)
        assert isinstance(actor, ExecutorActor)
        self.actors.append(actor)
        self.running.append(asyncio.create_task(actor.run()))

    async def leases(self, state: str = "ready") -> dict[str, LeaseInfo]:
        """All leases, once every rank is in this state."""

        def told(leases: dict[str, LeaseInfo]) -> bool:
            return len(leases) == len(self.actors) and all(each.info["state"] == state for each in leases.values())

        async with asyncio.timeout(LIMIT_S):
            while not told(found := {lease.name: lease for lease in await self.bus.leases()}):
                for task in self.running:
                    if task.done():
                        await task
                await asyncio.sleep(0.01)
        return found

    async def send(self, plan: StepPlan, epoch: int = 5) -> None:
        await self.bus.append([LogEntry(STEPS, EntryId(epoch, plan.step), plan)])

    async def entry(self) -> tuple[EntryId, StepResult | ReplicaFenced]:
        """What rank 0 says next."""
        async with asyncio.timeout(LIMIT_S):
            while not (entries := await self.bus.read({RESULTS: self.position}, count=1, block_ms=100)):
                pass
        self.position = entries[0].id
        message = entries[0].message
        assert isinstance(message, StepResult | ReplicaFenced)
        return entries[0].id, message

    async def generate(self, count: int) -> list[int]:
        """The tokens behind the prompt."""
        scheduler = scheduler_for((await self.leases())[NAME].info)
        sequence = scheduler.add(PROMPT, count)
        while (plan := scheduler.plan()) is not None:
            await self.send(plan)
            _, result = await self.entry()
            assert isinstance(result, StepResult)
            scheduler.process(result)
        return sequence.output

    async def ended(self, rank: int) -> None:
        """Wait for the end of a rank; raises what ended it."""
        async with asyncio.timeout(LIMIT_S):
            await self.running[rank]


@asynccontextmanager
async def group(folder: Path, *ranks: int, world: int = 2, **settings: Any) -> AsyncIterator[Group]:
    made = Group(folder, world, **settings)
    for rank in ranks:
        made.start(rank)
    try:
        yield made
    finally:
        for actor in made.actors:
            actor.request_drain()
        await asyncio.wait(made.running, timeout=LIMIT_S)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)], ids=["in order", "rank 1 first"])
async def test_ranks_find_each_other_and_compute_together(ranks: tuple[int, int], folder: Path) -> None:
    """Rank 0 alone tells results; its lease has what the scheduler plans by, and the other's which group it is of."""
    async with group(folder, *ranks) as running:
        leases = await running.leases()
        assert await running.generate(6) == reference_generate(folder, [PROMPT], 6)[0]
    first, second = leases[NAME], leases[f"{NAME}.1"]
    assert (first.kind, second.kind) == ("executor", "rank")
    assert [(lease.info["rank"], lease.info["world"]) for lease in (first, second)] == [(0, 2), (1, 2)]
    assert second.info["generation"] == first.epoch == running.position.epoch
    assert first.info["num_blocks"] == 20
    assert await running.bus.leases() == []


async def test_four_ranks(folder: Path) -> None:
    """Two of them hold the same head of keys."""
    async with group(folder, 0, 1, 2, 3, world=4) as running:
        assert await running.generate(4) == reference_generate(folder, [PROMPT], 4)[0]


async def test_ranks_with_whole_experts(tmp_path: Path) -> None:
    """Eight experts on two ranks; both have to divide them so."""
    folder = make_golden(tmp_path, "qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3})
    async with group(folder, 0, 1, enable_expert_parallel=True) as running:
        assert await running.generate(6) == reference_tokens(folder, [PROMPT], 6)[0]
        configs = [actor._engine._config for actor in running.actors]  # type: ignore[union-attr]
    feeds = [config.spec.layers[-1].feed for config in configs]
    assert [feed.own for feed in feeds if isinstance(feed, Moe)] == [range(4), range(4, 8)]
    async with group(folder, 0, enable_expert_parallel=True) as running:
        running.start(1, enable_expert_parallel=False)
        with pytest.raises(SettingsError, match=r"rank 1 on .* has another settings than rank 0"):
            await running.ended(0)


async def test_plans_for_a_group_before_are_passed_over_by_all(folder: Path) -> None:
    async with group(folder, 0, 1) as running:
        epoch = (await running.leases())[NAME].epoch
        await running.send(StepPlan(step=1, planned_s=0.0, num_decodes=0, executor_epoch=epoch + 100))
        await running.send(StepPlan(step=2, planned_s=0.0, num_decodes=0, executor_epoch=epoch))
        entry, result = await running.entry()
        assert isinstance(result, StepResult)
        assert (result.step, entry.epoch) == (2, epoch)


async def test_a_record_of_a_group_before_is_none(folder: Path) -> None:
    """It names the epochs of leases that are gone."""
    async with group(folder) as running:
        stale = Record(1, (99,), START, "file:/nowhere/store")
        await running.bus.put_state(record_state(NAME), stale.as_state())
        running.start(1)
        running.start(0)
        assert await running.generate(2) == reference_generate(folder, [PROMPT], 2)[0]


async def test_a_rank_with_other_settings_is_refused(folder: Path) -> None:
    async with group(folder, 0) as running:
        running.start(1, max_num_seqs=3)
        with pytest.raises(SettingsError, match=r"rank 1 on .* has another settings than rank 0"):
            await running.ended(0)


async def test_a_model_that_cannot_be_divided_is_refused(folder: Path) -> None:
    """Before anybody waits for anybody."""
    async with group(folder, 0, world=3) as running:
        with pytest.raises(ModelError, match="cannot be divided by so many ranks"):
            await running.ended(0)


async def test_a_lost_rank_ends_the_group(folder: Path) -> None:
    """Rank 0 writes the fence, so that the scheduler has the sequences computed elsewhere at once."""
    async with group(folder, 0, 1) as running:
        epoch = (await running.leases())[NAME].epoch
        running.running[1].cancel()
        with pytest.raises(EngineError, match=r"executor-0\.1 is gone"):
            await running.ended(0)
        entry, fence = await running.entry()
        assert entry == EntryId(epoch, FENCE_INDEX)
        assert isinstance(fence, ReplicaFenced)


async def test_a_lost_rank_0_ends_the_others(folder: Path) -> None:
    async with group(folder, 0, 1) as running:
        await running.leases()
        running.running[0].cancel()
        with pytest.raises(EngineError, match="executor-0 is gone"):
            await running.ended(1)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_group_drains_as_one(rank: int, folder: Path) -> None:
    """Whichever rank is told: what was planned is computed, and all end well."""
    async with group(folder, 0, 1) as running:
        await running.generate(2)
        running.actors[rank].request_drain()
        await running.ended(0)
        await running.ended(1)
        assert await running.bus.leases() == []


async def test_a_group_that_ended_on_purpose_is_known_by_the_first_lease_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a lost rank is waited for."""
    monkeypatch.setattr(rank_actors, "PATIENCE", 1 << 30)
    async with group(folder, 0, 1) as running:
        await running.generate(2)
        running.actors[0].request_drain()
        await running.ended(0)
        await running.ended(1)


async def test_ranks_sleep_and_wake_together(folder: Path) -> None:
    """Nothing of the model is in memory until they are woken; then they are a group like any other."""
    async with group(folder) as running:
        await running.bus.put_state(SLEEP_STATE, {"level": 1, "woken": []})
        running.start(0)
        running.start(1)
        leases = await running.leases("asleep")
        assert set(leases) == {NAME, f"{NAME}.1"}
        await running.bus.delete_state(SLEEP_STATE)
        assert await running.generate(2) == reference_generate(folder, [PROMPT], 2)[0]


@pytest.mark.parametrize(("rank", "expected"), [(0, LeadingRank), (1, FollowingRank)])
def test_which_actor_an_executor_is(rank: int, expected: type[ExecutorActor]) -> None:
    assert actor_class("executor", Settings(tensor_parallel_size=2, rank=rank)) is expected
    assert actor_class("executor", Settings()) is ExecutorActor


def test_ranks_need_a_common_name(folder: Path) -> None:
    with pytest.raises(SettingsError, match="--actor-name is needed"):
        LeadingRank(Settings(model=str(folder), tensor_parallel_size=2), MemoryBus(MemoryServer()), "executor-x")
