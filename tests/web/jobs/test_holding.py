"""Which entries still belong to a jobs actor whose lease had expired."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import Bus, BusUnavailable, Entry, EntryId
from pagebus.bus.messages import Job
from pagebus.web.jobs.holding import Holding

ENTRY = Entry("jobs", EntryId(1, 1), Job(request=""))


class AskedBus:
    """Says in turn who has the entry; an error is raised. ``when_asked`` is called with each question."""

    def __init__(self, *says: str | Exception) -> None:
        self.says = list(says)
        self.when_asked = lambda: None

    async def holders(self, *_: Any) -> dict[EntryId, str]:
        says = self.says.pop(0)
        self.when_asked()
        if isinstance(says, Exception):
            raise says
        return {ENTRY.id: says}

    def let_go(self, *_: Any) -> None:
        """As of the bus."""


def held(bus: AskedBus, working: asyncio.Event) -> tuple[Holding, asyncio.Task[None]]:
    """One entry, and the task that works on it."""
    holding = Holding(cast(Bus, bus), "jobs", "me", cast(Log, Quiet()))
    holding.begin([ENTRY])

    async def work() -> None:
        holding.work(ENTRY, "")
        working.set()
        await asyncio.Event().wait()

    return holding, asyncio.create_task(work())


class Quiet:
    def warning(self, *_: Any, **__: Any) -> None:
        """Nothing."""


async def test_an_expiry_while_the_bus_is_asked_is_checked_as_well() -> None:
    """The answer may be older than that. Whoever has the entry then writes its results."""
    bus, working = AskedBus("me", "other"), asyncio.Event()
    holding, task = held(bus, working)
    await working.wait()
    bus.when_asked = lambda: holding.lapsed(0.0)
    holding.lapsed(0.0)
    await holding.look()
    bus.when_asked = lambda: None
    assert ENTRY.id in holding
    await holding.look()
    assert ENTRY.id not in holding
    await asyncio.gather(task, return_exceptions=True)


async def test_a_check_that_fails_is_made_again() -> None:
    bus, working = AskedBus(BusUnavailable("away"), "me"), asyncio.Event()
    holding, task = held(bus, working)
    await working.wait()
    holding.lapsed(0.0)
    for _ in range(2):
        try:
            await holding.look()
        except BusUnavailable:
            continue
    assert bus.says == []
    await holding.stop()
    assert task.cancelled()
