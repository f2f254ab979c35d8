"""Whose absence the scheduler believes, and when."""

from __future__ import annotations

import time

import pytest

from pagebus.actors.scheduler.events import IngressLost, Input
from pagebus.actors.scheduler.service.lease_watch import LOOK_S, LeaseWatch
from pagebus.actors.scheduler.service.membership import Membership
from pagebus.bus.contract import FENCE_INDEX, EntryId, Fenced
from pagebus.bus.memory.bus import MemoryBus, MemoryServer

TTL_S = 5.0


async def test_a_new_scheduler_gives_nobody_up_before_the_time_of_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus may have taken no renewal for a while, and the scheduler before it may have died of that."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    events: list[Input] = []
    membership = Membership(events.append, lambda *_: None)
    membership.expect(["web@3"])
    bus = MemoryBus(MemoryServer(lambda: 0.0))
    lease_watch = LeaseWatch(bus, membership, TTL_S)
    epoch = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=TTL_S)
    while now_s < 1000.0 + TTL_S:
        await lease_watch.look(epoch)
        assert IngressLost("web@3") not in events
        now_s += LOOK_S
    await lease_watch.look(epoch)
    assert IngressLost("web@3") in events


async def test_who_was_given_up_stays_so_though_the_bus_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was frozen then takes its lease back, and has it taken away again before it counts for alive."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    events: list[Input] = []
    membership = Membership(events.append, lambda *_: None)
    server = MemoryServer(lambda: now_s)
    bus = MemoryBus(server)
    lease_watch = LeaseWatch(bus, membership, TTL_S)
    epoch = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=100.0)
    frozen = await bus.acquire_lease("ingress", "web", {}, ttl_s=TTL_S)
    while IngressLost(f"web@{frozen}") not in events:
        await lease_watch.look(epoch)
        now_s += LOOK_S
    server.granted.clear()
    await bus.renew_lease("ingress", "web", frozen, {}, ttl_s=TTL_S)
    await lease_watch.look(epoch)
    assert list(membership.ingresses) == []
    with pytest.raises(Fenced):
        await bus.renew_lease("ingress", "web", frozen, {}, ttl_s=TTL_S)
    again = await bus.acquire_lease("ingress", "web", {}, ttl_s=TTL_S)
    await lease_watch.look(epoch)
    assert list(membership.ingresses) == [f"web@{again}"]


async def test_who_was_given_up_in_a_takeover_ends_though_the_bus_forgets_it() -> None:
    """Its results are closed: nobody would take it, and it would wait for ever."""
    bus = MemoryBus(MemoryServer())
    lease_watch = LeaseWatch(bus, Membership(lambda event: None, lambda *_: None), TTL_S)
    epoch = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=100.0)
    frozen = await bus.acquire_lease("executor", "gpu-0", {}, ttl_s=100.0)
    lease_watch.shut_out("executor", "gpu-0", frozen)
    await lease_watch.look(epoch)
    with pytest.raises(Fenced):
        await bus.renew_lease("executor", "gpu-0", frozen, {}, ttl_s=100.0)
    await bus.acquire_lease("executor", "gpu-0", {}, ttl_s=100.0)


async def test_a_scheduler_that_others_have_heard_a_successor_of_ends() -> None:
    """The bus has forgotten that one, and the old one has its lease back; but nobody would listen to it."""
    bus = MemoryBus(MemoryServer())
    lease_watch = LeaseWatch(bus, Membership(lambda event: None, lambda *_: None), TTL_S)
    epoch = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=100.0)
    listener = await bus.acquire_lease("executor", "gpu-0", {"scheduler_epoch": epoch}, ttl_s=100.0)
    await lease_watch.look(epoch)
    await bus.renew_lease("executor", "gpu-0", listener, {"scheduler_epoch": epoch + 1}, ttl_s=100.0)
    with pytest.raises(Fenced, match=f"'gpu-0' has heard of a scheduler of epoch {epoch + 1}, after {epoch}"):
        await lease_watch.look(epoch)


async def test_an_executor_whose_results_have_been_closed_is_not_taken_back() -> None:
    """An earlier scheduler had given it up, which the bus has forgotten; detokenizers read nothing of it any more."""
    bus = MemoryBus(MemoryServer())
    membership = Membership(lambda event: None, lambda *_: None)
    lease_watch = LeaseWatch(bus, membership, TTL_S)
    epoch = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=100.0)
    executor = await bus.acquire_lease("executor", "gpu-0", {}, ttl_s=100.0)
    told = {"positions": {"results:gpu-0": str(EntryId(executor, FENCE_INDEX - 1))}}
    detokenizer = await bus.acquire_lease("detokenizer", "text", told, ttl_s=100.0)
    await lease_watch.look(epoch)
    await bus.renew_lease("executor", "gpu-0", executor, {}, ttl_s=100.0)
    told = {"positions": {"results:gpu-0": str(EntryId(executor, FENCE_INDEX))}}
    await bus.renew_lease("detokenizer", "text", detokenizer, told, ttl_s=100.0)
    await lease_watch.look(epoch)
    with pytest.raises(Fenced):
        await bus.renew_lease("executor", "gpu-0", executor, {}, ttl_s=100.0)
