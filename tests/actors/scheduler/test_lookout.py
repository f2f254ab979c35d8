"""Whose absence the scheduler believes, and when."""

from __future__ import annotations

import time

import pytest

from actors.scheduler.events import IngressLost, Input
from actors.scheduler.lookout import LOOK_S, Lookout
from actors.scheduler.membership import Membership
from bus.memory_bus import MemoryBus, MemoryServer

TTL_S = 5.0


async def test_a_new_scheduler_gives_nobody_up_before_the_time_of_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus may have taken no renewal for a while, and the scheduler before it may have died of that."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    events: list[Input] = []
    membership = Membership(events.append, lambda *_: None)
    membership.expect(["web@3"])
    bus = MemoryBus(MemoryServer(lambda: 0.0))
    lookout = Lookout(bus, membership, TTL_S)
    epoch = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=TTL_S)
    while now_s < 1000.0 + TTL_S:
        await lookout.look(epoch)
        assert IngressLost("web@3") not in events
        now_s += LOOK_S
    await lookout.look(epoch)
    assert IngressLost("web@3") in events
