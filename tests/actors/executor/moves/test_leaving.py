"""An executor that drains stays while others may pull from its cache; what becomes of pulls reaches the scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pagebus.actors.executor.moves import leaving
from pagebus.bus.contract import START
from pagebus.bus.messages import BlockPull, PullReport, StepPlan
from tests.actors.executor.test_actor import NAME, NAMES, World, empty_plan, settings, world
from tests.helpers.engine_driver import ints
from tests.helpers.waiting import LIMIT_S


async def drained(running: World, *, scheduler: bool = True) -> int:
    """Drain a ready executor beside a scheduler, if there is to be one; the scheduler's epoch."""
    await running.until_state("ready")
    epoch = await running.bus.acquire_lease("scheduler", "scheduler", {}, ttl_s=LIMIT_S) if scheduler else 0
    running.actor.request_drain()
    return epoch


async def test_a_drain_goes_on_with_plans_until_the_last(folder: Path) -> None:
    """Which the scheduler sends once nobody pulls any more."""
    async with world(settings(folder)) as running:
        epoch = await drained(running)
        await running.until_state("draining")
        await running.send(empty_plan(1), epoch)
        assert (await running.result()).step == 1
        await running.send(StepPlan(step=2, planned_s=0.0, num_decodes=0, is_last=True), epoch)
        await running.ended()

        assert (await running.result()).step == 2
        assert await running.bus.leases("executor") == []


async def test_a_drain_does_not_wait_for_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a scheduler that says nothing."""
    monkeypatch.setattr(leaving, "PATIENCE_S", 0.0)
    async with world(settings(folder)) as running:
        await drained(running)
        await running.ended()


async def test_a_drain_does_not_wait_for_a_scheduler_that_is_gone(folder: Path) -> None:
    async with world(settings(folder)) as running:
        epoch = await drained(running)
        await running.until_state("draining")
        await running.bus.release_lease("scheduler", "scheduler", epoch)
        await running.ended()


async def test_a_drain_does_not_wait_while_the_bus_is_away(folder: Path) -> None:
    async with world(settings(folder)) as running:
        epoch = await drained(running)
        await running.until_state("draining")
        running.server.unavailable = True
        assert not await running.actor._may_stay()
        running.server.unavailable = False
        await running.bus.release_lease("scheduler", "scheduler", epoch)


async def test_a_drain_of_blocks_that_do_not_move_ends_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is not waited for."""
    monkeypatch.setattr(leaving, "PATIENCE_S", 10 * LIMIT_S)
    async with world(settings(folder, kv_moves="off", drain_timeout_s=1000.0)) as running:
        await drained(running)
        await running.ended()


async def test_what_becomes_of_pulls_is_told(folder: Path) -> None:
    """Over the scheduler's stream, in the executor's name; the lease says what blocks it has."""
    async with world(settings(folder)) as running:
        info = await running.until_state("ready")
        assert info["kv_kind"]
        addresses = {7: info["kv_address"], 8: ""}
        plan = StepPlan(
            step=1, planned_s=0.0, num_decodes=0, pull_sources=ints([1, 2]), pull_blocks=ints([3, 4]),
            pulls=tuple(BlockPull(pull=i, address=each, num_blocks=1) for i, each in addresses.items()),
        )  # fmt: skip
        await running.send(plan, epoch=5)
        told: dict[int, PullReport] = {}
        async with asyncio.timeout(LIMIT_S):
            while len(told) < 2:
                for entry in await running.bus.read({NAMES.control: START}, block_ms=20):
                    if isinstance(entry.message, PullReport):
                        told[entry.message.pull] = entry.message

        assert {(each.replica, each.executor_epoch, each.scheduler_epoch) for each in told.values()} == {
            (NAME, running.actor.epoch, 5)
        }
        assert [(told[7].there, told[7].error), told[8].there] == [(True, ""), False]
        assert "cannot be read" in told[8].error
