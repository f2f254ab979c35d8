"""Taking over while the bus fails and executors come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from pagebus.actors.scheduler.recovery.journal import Ledger
from pagebus.actors.scheduler.recovery.takeover import Recovered, Takeover
from pagebus.bus.contract import FENCE_INDEX, START, BusUnavailable, Entry, EntryId
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import ReplicaFenced, RequestMoved
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names
from tests.actors.scheduler.served_scheduler import ask
from tests.helpers.waiting import LIMIT_S

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
    async with asyncio.timeout(LIMIT_S):
        await takeover.run()
    assert takeover.read == {"gpu-0": EntryId(first, FENCE_INDEX)}
    entries = await bus.read({NAMES.results("gpu-0"): START})
    assert [(entry.id, type(entry.message)) for entry in entries] == [(EntryId(first, FENCE_INDEX), ReplicaFenced)]
    sending.cancel()
    await asyncio.wait([sending])


@pytest.mark.parametrize("moved_asked", [4, 6])
def test_replies_go_to_where_the_client_asked_last(moved_asked: int) -> None:
    """Its entry or the journal may tell the later address: that it had moved was lost with the scheduler, or what
    stands for the request is the entry before."""
    ledger = Ledger()
    ledger.read(RequestMoved(request_id="a", ingress="moved@1", attempt="moved", asked=moved_asked))
    entry = replace(ask("a", max_tokens=8), ingress="entry@2", attempt="entry", asked=5)

    request, others, outputs = Recovered(ledger).claim(entry)

    last = ("entry@2", "entry", 5) if moved_asked < 5 else ("moved@1", "moved", 6)
    assert (request.ingress, request.attempt, request.asked) == last
    assert (others, outputs) == ((), {})
