"""Work that has been taken in, and when the bus may forget it."""

from __future__ import annotations

import asyncio

from pagebus.actors.scheduler.service.work_stream import WorkStream
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AbortRequest, ReplicaFenced
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names

NAMES = Names("pagebus")


async def test_what_has_been_taken_in_is_acknowledged_when_all_that_follows_from_it_is_stored() -> None:
    """Also what was queued after the entry was settled, in the same turn: else it could be lost together with it."""
    bus = MemoryBus(MemoryServer(), NAMES)
    outbox = Outbox(bus, await bus.acquire_lease("scheduler", "leader", {}, ttl_s=1000))
    stored: list[int] = []

    async def confirm() -> None:
        stored.append(await bus.length(NAMES.journal))

    work = WorkStream(bus, NAMES, "me", outbox, confirm)
    await work.create_groups()
    await bus.publish([(NAMES.control, AbortRequest(request_id="a"))])
    (entry,) = await work.read(new_requests=True)

    work.settled(entry)
    outbox.publish(NAMES.journal, ReplicaFenced(replica="gpu-0", reason="what follows from it"))
    sending = asyncio.create_task(outbox.run())
    await work.acknowledge()

    assert stored == [1]
    assert not work.has_settled
    sending.cancel()
    await asyncio.wait([sending])
