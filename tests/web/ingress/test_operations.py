"""Executors of several ranks sleep as a whole: the answer comes when none of their ranks holds anything any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pagebus.actors.runtime.actor import orders_state
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import HoldState
from pagebus.web.ingress import operations
from pagebus.web.ingress.membership import Membership
from pagebus.web.ingress.operations import Operations
from tests.helpers.waiting import LIMIT_S, until

TTL_S = 600.0


class AtRest:
    """A scheduler that has nothing to compute."""

    address = "ingress-0"

    async def ask(self, kind: type, make: Callable[[int], Any]) -> Any:
        return HoldState(serial=1, mode="abort", at_rest=True) if kind is HoldState else None


class Looking(Membership):
    """Counts its looks."""

    looks = 0

    async def refresh(self) -> None:
        await super().refresh()
        self.looks += 1


async def test_sleep_waits_for_all_ranks(monkeypatch) -> None:
    monkeypatch.setattr(operations, "LOOK_S", 0.001)
    bus = MemoryBus(MemoryServer())
    executor = await bus.acquire_lease("executor", "executor-0", {"state": "ready"}, ttl_s=TTL_S)
    rank = await bus.acquire_lease("rank", "executor-0.1", {"state": "ready"}, ttl_s=TTL_S)
    membership = Looking(bus, fresh_s=TTL_S)
    held = Operations(bus, AtRest(), membership, restarts_alone=True)
    sleeping = asyncio.create_task(held.sleep(1, "abort"))
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: membership.looks > 2)
        assert (await bus.get_state(orders_state("executor", "executor-0")))[0] is not None
        await bus.renew_lease("executor", "executor-0", executor, {"state": "asleep"}, ttl_s=TTL_S)
        before = membership.looks
        await until(lambda: membership.looks > before + 5 or sleeping.done())
        assert not sleeping.done()  # a rank still has its part of the model
        assert (await bus.get_state(orders_state("rank", "executor-0.1")))[0] is None
        await bus.renew_lease("rank", "executor-0.1", rank, {"state": "asleep"}, ttl_s=TTL_S)
        await sleeping
