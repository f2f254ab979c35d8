"""What observers may count on while the scheduler keeps the streams short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.scheduler.trimming import Trimmer
from bus.contract import EntryId, LogEntry
from bus.memory_bus import MemoryBus
from bus.memory_server import MemoryServer
from bus.messages import StepPlan
from bus.streams import Names

NAMES = Names("test")
EPOCH = 7


async def test_what_may_go_stays_for_one_more_round() -> None:
    """A recorder that is a round late misses nothing; of a replica that is gone all goes at once."""
    bus = MemoryBus(MemoryServer())
    stream = NAMES.steps("gpu-0")
    plans = [StepPlan(step=step, planned_s=0.0, num_decodes=0) for step in range(1, 6)]
    await bus.append([LogEntry(stream, EntryId(EPOCH, plan.step), plan) for plan in plans])
    core: Any = SimpleNamespace(replicas={"gpu-0": SimpleNamespace(landing=SimpleNamespace(landed=3))})
    membership: Any = SimpleNamespace(positions={}, live_detokenizers=set())
    trimmer = Trimmer(bus, NAMES, EPOCH)
    positions = {"gpu-0": EntryId(1, 3)}

    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 5
    core.replicas["gpu-0"].landing.landed = 4
    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 2
    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 1

    core.replicas.clear()
    trimmer.replica_lost("gpu-0", 5)
    await trimmer.trim(core, membership, positions)
    assert await bus.length(stream) == 0
