"""Taking over while the bus fails and executors come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from actors.scheduler.takeover import Takeover
from bus.contract import FENCE_INDEX, START, BusUnavailable, Entry, EntryId
from bus.memory_bus import MemoryBus, MemoryServer
from bus.messages import ReplicaFenced
from bus.outbox import Outbox
from bus.streams import Names

NAMES = Names("pagebus")
READY = {"state": "ready"}


async def test_an_executor_that_is_replaced_between_two_runs_is_not_waited_for() -> None:
    """The first run sent a plan to the one before, and was interrupted by the bus: nobody will answer that plan."""
    bus = MemoryBus(MemoryServer(), NAMES)
    first = await bus.acquire_lease("executor", "gpu-0", READY, ttl_s=1000)
    outbox = Outbox(bus, await bus.acquire_lease("scheduler", "leader", {}, ttl_s=1000))
    takeover = Takeover(bus, NAMES, outbox)
    read = bus.read

    async def interrupted(positions: Mapping[str, EntryId], **options: Any) -> list[Entry]:
        if NAMES.results("gpu-0") not in positions:
            return await read(positions, **options)
        bus.read = read  # type: ignore[method-assign]
        raise BusUnavailable("started anew")

    bus.read = interrupted  # type: ignore[method-assign]
    sending = asyncio.create_task(outbox.run())
    try:
        await takeover.run()
    except BusUnavailable:
        await bus.release_lease("executor", "gpu-0", first)
    await bus.acquire_lease("executor", "gpu-0", READY, ttl_s=1000)
    async with asyncio.timeout(10):
        await takeover.run()
    assert takeover.read == {"gpu-0": EntryId(first, FENCE_INDEX)}
    entries = await bus.read({NAMES.results("gpu-0"): START})
    assert [(entry.id, type(entry.message)) for entry in entries] == [(EntryId(first, FENCE_INDEX), ReplicaFenced)]
    sending.cancel()
    await asyncio.wait([sending])
