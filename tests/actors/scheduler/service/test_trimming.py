"""What observers may count on while the scheduler keeps the streams short."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pagebus.actors.scheduler.recovery.checkpoints import Checkpoints
from pagebus.actors.scheduler.service.trimming import AGAIN_ROUNDS, Trimmer
from pagebus.bus.contract import START, EntryId, LogEntry
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import RequestMoved, StepPlan
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names
from tests.dst.past import Past

NAMES = Names("test")
EPOCH = 7


async def test_what_may_go_stays_for_one_more_round() -> None:
    """A recorder that is a round late misses nothing; of a replica that is gone all goes at once."""
    bus = MemoryBus(MemoryServer())
    stream = NAMES.steps("gpu-0")
    plans = [StepPlan(step=step, planned_s=0.0, num_decodes=0) for step in range(1, 6)]
    await bus.append([LogEntry(stream, EntryId(EPOCH, plan.step), plan) for plan in plans])
    core: Any = SimpleNamespace(replicas={"gpu-0": SimpleNamespace(step_results=SimpleNamespace(last_step=3))})
    membership: Any = SimpleNamespace(positions={}, live_detokenizers=set())
    trimmer = Trimmer(bus, NAMES, EPOCH)
    positions = {"gpu-0": EntryId(1, 3)}

    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 5
    core.replicas["gpu-0"].step_results.last_step = 4
    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 2
    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 1

    core.replicas.clear()
    trimmer.replica_lost("gpu-0", 5)
    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 0


async def test_a_drain_may_trim_beside_the_housekeeping() -> None:
    """Both drop what nobody will read, and neither minds that the other one has."""
    bus = MemoryBus(MemoryServer())
    core: Any = SimpleNamespace(replicas={})
    membership: Any = SimpleNamespace(positions={}, live_detokenizers=set())
    trimmer = Trimmer(bus, NAMES, EPOCH)
    trim = bus.trim

    async def slowly(stream: str, through: EntryId) -> int:
        await asyncio.sleep(0)
        return await trim(stream, through)

    bus.trim = slowly  # type: ignore[method-assign]
    trimmer.detokenizer_lost(NAMES.sequences("text"), EntryId(EPOCH, 3))
    await asyncio.gather(*(trimmer.trim(core, membership, {}) for _ in range(2)))
    assert not trimmer._unread


async def test_what_a_replaced_scheduler_writes_late_is_trimmed() -> None:
    """It was frozen; its successor has trimmed the stream of an executor since, and has no plan for it."""
    bus = MemoryBus(MemoryServer())
    core: Any = SimpleNamespace(replicas={"gpu-0": SimpleNamespace(step_results=SimpleNamespace(last_step=0))})
    membership: Any = SimpleNamespace(positions={}, live_detokenizers=set())
    trimmer = Trimmer(bus, NAMES, EPOCH)
    for _ in range(2):
        await trimmer.trim(core, membership, {"gpu-0": START})
    plan = StepPlan(step=73, planned_s=0.0, num_decodes=0)
    await bus.append([LogEntry(NAMES.steps("gpu-0"), EntryId(EPOCH - 1, 73), plan)])
    for _ in range(AGAIN_ROUNDS):
        await trimmer.trim(core, membership, {"gpu-0": START})
    assert await bus.length(NAMES.steps("gpu-0")) == 0


async def test_what_a_replaced_scheduler_notes_late_is_dropped() -> None:
    """Its successor, which has nothing to note, has read the journal to its end before."""
    bus = MemoryBus(MemoryServer())
    checkpoints = Checkpoints(bus, NAMES, Outbox(bus, EPOCH), end=EntryId(EPOCH - 1, 1), covered={})
    core: Any = SimpleNamespace(is_forgettable=True)
    membership: Any = SimpleNamespace()
    await checkpoints.sum_up(core, {}, membership, ())
    late = RequestMoved(request_id="a", ingress="in", attempt="b")
    await bus.append([LogEntry(NAMES.journal, EntryId(EPOCH - 1, 2), late)])
    for _ in range(AGAIN_ROUNDS):
        await checkpoints.sum_up(core, {}, membership, ())
    assert await bus.length(NAMES.journal) == 0


async def test_what_comes_back_with_a_server_is_trimmed_again() -> None:
    """Its last trims are lost in a restart."""
    server = MemoryServer()
    bus = MemoryBus(server)
    outbox = Outbox(bus, EPOCH)
    sending = asyncio.create_task(outbox.run())
    stream = NAMES.steps("gpu-0")
    outbox.append(stream, StepPlan(step=1, planned_s=0.0, num_decodes=0))
    trimmer = Trimmer(bus, NAMES, EPOCH)
    core: Any = SimpleNamespace(replicas={}, is_forgettable=True)
    membership: Any = SimpleNamespace(positions={}, live_detokenizers=set())
    trimmer.replica_lost("gpu-0", 1)
    checkpoints = Checkpoints(bus, NAMES, outbox, end=START, covered={})
    checkpoints.append(RequestMoved(request_id="a", ingress="in", attempt="b"))
    await outbox.flush()
    past = Past(server)

    async def trim() -> list[int]:
        await checkpoints.sum_up(core, {}, membership, ())
        await trimmer.trim(core, membership, {"gpu-0": EntryId(1, 1)})
        return [await bus.length(each) for each in (stream, NAMES.journal)]

    assert await trim() == [0, 0]
    past.restore(server)
    assert await trim() == [1, 1]
    trimmer.bus_restarted()
    checkpoints.bus_restarted()
    assert await trim() == [0, 0]
    sending.cancel()
    await asyncio.wait([sending])
