"""Operations on the whole deployment: pause and resume the work, reset caches, put executors to sleep and wake them.

A hold is written to the bus before the scheduler hears of it, so a new scheduler and new executors continue it. Slow
operations are polled: no actor has to remember who waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from pagebus.actors.runtime.actor import orders_state
from pagebus.bus.contract import Bus, LeaseInfo
from pagebus.bus.messages import (
    HOLD_KEEP,
    HOLD_NONE,
    HOLD_STATE,
    SLEEP_STATE,
    CacheResetRequested,
    HoldRequested,
    HoldState,
)
from pagebus.web.http.errors import ApiError
from pagebus.web.ingress.membership import Membership
from pagebus.web.observatory.scheduler_queries import SchedulerQueries

LOOK_S = 0.1
ORDER_TTL_S = 60.0
BACK_S = 30.0
"""Time for executors that have ended to restart, asleep."""
TAGS = ("weights", "kv_cache", "scheduling")
"""The parts that vLLM can wake separately."""
ASLEEP = "asleep"
EXECUTOR, RANK = "executor", "rank"
"""Kinds of leases of what sleeps."""


class Operations:
    """``restarts_alone``: whether an executor can be restarted while the other actors run."""

    def __init__(self, bus: Bus, queries: SchedulerQueries, membership: Membership, *, restarts_alone: bool) -> None:
        self._bus = bus
        self._queries = queries
        self._membership = membership
        self._restarts_alone = restarts_alone

    async def mode(self) -> str:
        """The mode of the hold; "": none."""
        return (await self._ask(None)).mode

    async def hold(self, mode: str, *, resets: bool = True) -> None:
        """Hold the work, and wait until nothing is computed any more. ``resets``: then empty the caches, unless what
        runs is kept."""
        await self._bus.put_state(HOLD_STATE, {"mode": mode})
        state = await self._ask(mode)
        while not state.at_rest and state.mode == mode:  # another scheduler may answer the next query
            await asyncio.sleep(LOOK_S)
            state = await self._ask(None)
        if resets and mode != HOLD_KEEP:
            await self.reset_caches(host=True)

    async def let_go(self) -> None:
        """Resume the work."""
        await self._bus.delete_state(HOLD_STATE)
        await self._ask(HOLD_NONE)

    async def reset_caches(self, *, host: bool = False, running: bool = False) -> None:
        """Empty the prefix caches."""
        address = self._queries.address
        await self._queries.ask(
            HoldState,
            lambda serial: CacheResetRequested(ingress=address, serial=serial, host=host, running=running),
        )

    async def _ask(self, mode: str | None) -> HoldState:
        address = self._queries.address
        return await self._queries.ask(
            HoldState, lambda serial: HoldRequested(ingress=address, serial=serial, mode=mode)
        )

    # -- sleep --------------------------------------------------------------------------------------------------------
    async def is_asleep(self) -> bool:
        (state,) = await self._bus.get_state(SLEEP_STATE)
        return state is not None

    async def sleep(self, level: int, mode: str) -> None:
        """Hold the work, then have all executors end; they start again, and wait with empty memory.

        Raises:
            ApiError: 409, they cannot: all actors share one process.
        """
        if level and not self._restarts_alone:
            raise ApiError(409, "All actors share one process here: none can sleep alone.", code="single_process")
        await self.hold(mode)
        if not level:
            return
        await self._bus.put_state(SLEEP_STATE, {"level": level, "woken": []})
        wanted = len(await self._sleepers(asleep=False)) + len(await self._sleepers(asleep=True))
        while awake := await self._sleepers(asleep=False):
            for lease in awake:
                if lease.kind == EXECUTOR:  # its other ranks end with it
                    order = {"epoch": lease.epoch, "order": "drain"}
                    await self._bus.put_state(orders_state(EXECUTOR, lease.name), order, ttl_s=ORDER_TTL_S)
            await asyncio.sleep(LOOK_S)
        with contextlib.suppress(TimeoutError):  # no need to start them again
            async with asyncio.timeout(BACK_S):
                while len(await self._sleepers(asleep=True)) < wanted:  # noqa: ASYNC110 (the bus does not notify)
                    await asyncio.sleep(LOOK_S)

    async def wake(self, tags: Collection[str]) -> bool:
        """Wake executors once all their parts have been named (no ``tags``: all), and resume the work. Returns whether
        they are awake."""
        (state,) = await self._bus.get_state(SLEEP_STATE)
        if state is not None:
            told = state.get("woken")
            woken = {*tags, *(map(str, told) if isinstance(told, list) else ())} if tags else set(TAGS)
            if not woken >= {"weights", "kv_cache"}:
                await self._bus.put_state(SLEEP_STATE, {**state, "woken": sorted(woken)})
                return False
            await self._bus.delete_state(SLEEP_STATE)
            while await self._sleepers(asleep=True) or EXECUTOR in self._membership.missing():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        await self.let_go()
        return True

    async def _sleepers(self, *, asleep: bool) -> list[LeaseInfo]:
        """The leases of executors, and of their ranks, that sleep, or that do not."""
        await self._membership.refresh()
        leases = [lease for lease in self._membership.leases if lease.kind in (EXECUTOR, RANK)]
        return [each for each in leases if (each.info.get("state") == ASLEEP) == asleep]
