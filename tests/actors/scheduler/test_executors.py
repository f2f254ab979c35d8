"""Executors that die, fall silent, come back or talk nonsense, as the scheduler's actor sees them."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.bus.contract import FENCE_INDEX, EntryId, Fenced, LogEntry
from pagebus.bus.messages import (
    ReplicaFenced,
)
from tests.actors.scheduler.fake_model import expected_tokens
from tests.actors.scheduler.served_scheduler import NAMES, PROMPT, TTL_S, Deployment, ask
from tests.helpers.waiting import until


async def test_an_executor_that_closed_its_results_before_does_not_join_a_new_scheduler() -> None:
    """It failed together with the scheduler, and its lease outlives it for a moment. The next one of its name does."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        deployment.pause_after = 6
        await deployment.send(ask("a", max_tokens=40))
        await until(lambda: len(deployment.results) == 6)
        await deployment.lose_scheduler()
        await deployment.stop_executor("gpu-0")
        epoch = deployment.epochs["gpu-0"]
        fence = ReplicaFenced(replica="gpu-0", reason="a device fault", error="RuntimeError")
        await deployment.bus.append([LogEntry(NAMES.results("gpu-0"), EntryId(epoch, FENCE_INDEX), fence)])
        await deployment.start_scheduler()
        looked_s = deployment.scheduler._leader.lease_watch.looked_s
        await until(lambda: deployment.scheduler._leader.lease_watch.looked_s > looked_s)
        assert not deployment.scheduler._leader.membership.members

        await deployment.bus.release_lease("executor", "gpu-0", epoch)
        deployment.pause_after = None
        await deployment.add_executor("gpu-0")
        await until(lambda: set(deployment.scheduler.core.delivery.finished) == {"a"})
        assert deployment.tokens() == expected_tokens(PROMPT, 40)


async def test_an_executor_that_failed_before_it_was_seen_does_not_join() -> None:
    """The next one of its name has closed its results before the scheduler has seen its lease, which outlives it for a
    moment. Plans for it would never be answered."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        await until(lambda: "gpu-0" in deployment.scheduler.core.replicas)
        await deployment.stop_executor("gpu-0")
        (lease,) = await deployment.bus.leases("executor")
        await deployment.bus.release_lease("executor", "gpu-0", lease.epoch)
        epoch = await deployment.bus.acquire_lease("executor", "gpu-0", lease.info, ttl_s=TTL_S)
        fence = ReplicaFenced(replica="gpu-0", reason="a device fault", error="RuntimeError")
        await deployment.bus.append([LogEntry(NAMES.results("gpu-0"), EntryId(epoch, FENCE_INDEX), fence)])
        await until(lambda: not deployment.scheduler.core.replicas)
        looked_s = deployment.scheduler._leader.lease_watch.looked_s
        await until(lambda: deployment.scheduler._leader.lease_watch.looked_s > looked_s)
        assert not deployment.scheduler._leader.membership.members

        await deployment.bus.release_lease("executor", "gpu-0", epoch)
        await deployment.add_executor("gpu-0")
        await deployment.send(ask("a", max_tokens=4))
        await until(lambda: set(deployment.scheduler.core.delivery.finished) == {"a"})


@pytest.mark.parametrize("later", [0, 1], ids=["closed, and trimmed", "followed by another one"])
async def test_a_successor_does_not_wait_for_the_end_of_results_that_are_over(later: int) -> None:
    """An executor is lost with its scheduler, and no fence of it will ever be read: it is not there any more, or an
    executor after it has written already."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        deployment.pause_after = 6
        await deployment.send(ask("a", max_tokens=40))
        await until(lambda: len(deployment.results) == 6)
        await deployment.lose_scheduler()
        await deployment.stop_executor("gpu-0")
        epoch = deployment.epochs["gpu-0"]
        last = EntryId(epoch + later, 1 if later else FENCE_INDEX)
        await deployment.bus.append([LogEntry(NAMES.results("gpu-0"), last, deployment.results[0])])
        if not later:
            await deployment.bus.trim(NAMES.results("gpu-0"), last)
        await deployment.bus.release_lease("executor", "gpu-0", epoch)

        await deployment.start_scheduler()
        deployment.pause_after = None
        await deployment.add_executor("gpu-1")
        await until(lambda: set(deployment.scheduler.core.delivery.finished) == {"a"})
        assert deployment.tokens()[-1] == expected_tokens(PROMPT, 40)[-1]


async def test_a_plan_that_nobody_answers_in_a_takeover_is_trimmed() -> None:
    """The executor is lost while the new scheduler waits for it."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        await until(lambda: "gpu-0" in deployment.scheduler.core.replicas)
        await deployment.lose_scheduler()
        await deployment.stop_executor("gpu-0")
        starting = asyncio.create_task(deployment.start_scheduler())
        await until(lambda: deployment.server.stream(NAMES.steps("gpu-0")).ids)
        await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
        await starting
        await deployment.scheduler._leader._keep_house(pause_s=0.0)
        assert await deployment.lengths(NAMES.steps("gpu-0")) == [0]


async def test_an_executor_that_comes_back_gets_only_new_plans() -> None:
    """The same name under a new lease: the step numbers go on, and the request ends with its tokens."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        deployment.pause_after = 20
        await deployment.send(ask("a", max_tokens=100))
        await until(lambda: len(deployment.tokens()) > 5)
        await deployment.stop_executor("gpu-0")
        deployment.pause_after = None
        await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
        await deployment.add_executor()

        await until(lambda: not deployment.scheduler.core.requests)
        tokens = {int(i): int(t) for r in deployment.results for i, t in zip(r.token_indexes, r.token_ids, strict=True)}
        assert [tokens[i] for i in range(100)] == expected_tokens(PROMPT, 100)


async def test_an_executor_that_answers_nonsense_is_shut_out() -> None:
    """A false result fences its executor; the request goes on elsewhere."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0", falsify=True)
        await deployment.send(ask("a", max_tokens=30))
        await until(lambda: "gpu-0" not in deployment.scheduler.core.replicas and len(deployment.results) >= 2)
        await deployment.add_executor("gpu-1")
        await until(lambda: not deployment.scheduler.core.requests)
        fences = await deployment.bus.read({NAMES.results("gpu-0"): EntryId(deployment.epochs["gpu-0"], 2**61)})
        assert [type(entry.message) for entry in fences] == [ReplicaFenced]


async def test_a_frozen_executor_cannot_come_back() -> None:
    """Once it is given up for its silence, renewing its lease fails, though nobody took its place."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        await until(lambda: "gpu-0" in deployment.scheduler.core.replicas)
        await deployment.stop_executor("gpu-0")
        await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
        await until(lambda: "gpu-0" not in deployment.scheduler.core.replicas)
        with pytest.raises(Fenced):
            await deployment.bus.renew_lease("executor", "gpu-0", deployment.epochs["gpu-0"], {}, ttl_s=TTL_S)
