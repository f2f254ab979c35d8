"""Leases, and the end of a bus: the promises of bus/contract.py, kept by MemoryBus and RedisBus alike."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pagebus.bus.contract import START, Bus, BusUnavailable, EntryId, Fenced, LeaseTaken, LogEntry
from pagebus.bus.messages import Message, StepPlan
from tests.bus.entries import GROUP, OpenBus, publish


async def test_lease_has_one_holder(open_bus: OpenBus) -> None:
    """A second taker is refused until the first has released; each grant has a larger epoch."""
    first, second = open_bus(), open_bus()
    epoch = await first.acquire_lease("scheduler", "leader", {"state": "starting"}, ttl_s=1000)
    with pytest.raises(LeaseTaken, match="already running"):
        await second.acquire_lease("scheduler", "leader", {}, ttl_s=1000)
    await second.release_lease("scheduler", "leader", epoch + 1)
    with pytest.raises(LeaseTaken):
        await second.acquire_lease("scheduler", "leader", {}, ttl_s=1000)
    await first.release_lease("scheduler", "leader", epoch)
    await first.release_lease("scheduler", "leader", epoch)
    assert await second.acquire_lease("scheduler", "leader", {}, ttl_s=1000) > epoch


async def test_renewing_replaces_the_info(bus: Bus) -> None:
    """A renewed lease shows its new info under the same epoch."""
    epoch = await bus.acquire_lease("executor", "e:0", {"state": "loading"}, ttl_s=1000)
    await bus.renew_lease("executor", "e:0", epoch, {"state": "ready", "num_blocks": 7}, ttl_s=1000)
    (lease,) = await bus.leases("executor")
    assert (lease.kind, lease.name, lease.epoch) == ("executor", "e:0", epoch)
    assert lease.info == {"state": "ready", "num_blocks": 7}


async def test_renewing_anothers_lease_is_fenced(bus: Bus) -> None:
    """A holder whose lease was taken by somebody else learns it."""
    epoch = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", epoch)
    newer = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    with pytest.raises(Fenced, match=f"belongs to epoch {newer}"):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", newer)
    with pytest.raises(Fenced):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)


async def test_a_revoked_lease_cannot_be_taken_back(bus: Bus) -> None:
    """Who slept through the end of its lease and was given up learns it; a lease that is held cannot be revoked."""
    epoch = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    assert not await bus.revoke_lease("executor", "e0")
    await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", epoch)
    await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    await bus.release_lease("executor", "e0", epoch)
    assert await bus.revoke_lease("executor", "e0")
    with pytest.raises(Fenced):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    assert await bus.leases() == []
    assert await bus.acquire_lease("executor", "e0", {}, ttl_s=1000) > epoch


async def test_a_later_holder_takes_its_lease_back(bus: Bus) -> None:
    """A server that has forgotten its grant may have given it back to whoever had it before."""
    epoch = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    assert await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000) is True
    assert await bus.renew_lease("executor", "e0", epoch + 1, {}, ttl_s=1000) is False
    assert await bus.renew_lease("executor", "e0", epoch + 1, {}, ttl_s=1000) is True
    with pytest.raises(Fenced, match=f"belongs to epoch {epoch + 1} now, not to {epoch}"):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)


async def test_a_lease_can_be_revoked_below_an_epoch(bus: Bus) -> None:
    """Whoever was given up, and holds it again all the same, is shut out; not whoever came later."""
    epoch = await bus.acquire_lease("executor", "e0", {}, ttl_s=1000)
    assert await bus.revoke_lease("executor", "e0", below=epoch) == 0
    await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    assert await bus.revoke_lease("executor", "e0", below=epoch + 1) > epoch
    with pytest.raises(Fenced):
        await bus.renew_lease("executor", "e0", epoch, {}, ttl_s=1000)
    assert await bus.leases() == []


async def test_leases_are_listed_by_kind_and_name(bus: Bus) -> None:
    """All live leases, or those of one kind, in order."""
    for kind, name in (("tokenizer", "t1"), ("executor", "e2"), ("executor", "e1"), ("exec", "z")):
        await bus.acquire_lease(kind, name, {}, ttl_s=1000)
    assert [(lease.kind, lease.name) for lease in await bus.leases()] == [
        ("exec", "z"),
        ("executor", "e1"),
        ("executor", "e2"),
        ("tokenizer", "t1"),
    ]
    assert [lease.name for lease in await bus.leases("executor")] == ["e1", "e2"]
    assert await bus.leases("detokenizer") == []


async def test_concurrent_takers_agree_on_one_holder(open_bus: OpenBus) -> None:
    """Of many that try at once, exactly one gets the lease."""
    takers = [open_bus() for _ in range(5)]
    results = await asyncio.gather(
        *(bus.acquire_lease("scheduler", "leader", {}, ttl_s=1000) for bus in takers), return_exceptions=True
    )
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, LeaseTaken) for result in results) == 4


async def test_close_ends_pending_reads(open_bus: OpenBus) -> None:
    """Reads that wait when the bus is closed return nothing; later calls are refused."""
    bus, other = open_bus(), open_bus()
    waiting = [
        asyncio.create_task(bus.read({"l": START}, block_ms=30_000)),
        asyncio.create_task(bus.read_group(GROUP, "a", ["s"], block_ms=30_000)),
    ]
    await other.ping()
    await bus.close()
    await bus.close()
    assert await asyncio.gather(*waiting) == [[], []]
    with pytest.raises(BusUnavailable, match="closed"):
        await publish(bus, "s", 1)
    with pytest.raises(BusUnavailable, match="closed"):
        await bus.read({"l": START}, block_ms=0)


async def test_nothing_mutable_is_shared(bus: Bus) -> None:
    """Changing what was published does not change what readers get, and arrays read are read-only."""
    slots = np.array([1, 2, 3], np.int32)
    message: Message = StepPlan(step=1, planned_s=0.0, num_decodes=0, slots=slots)
    await bus.append([LogEntry("l", EntryId(1, 1), message)])
    slots[:] = 9
    (entry,) = await bus.read({"l": START}, block_ms=0)
    assert isinstance(entry.message, StepPlan)
    assert entry.message.slots.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        entry.message.slots[0] = 5
