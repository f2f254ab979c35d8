"""A bus that grants leases at will, and an actor that waits on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.settings import Settings
from pagebus.bus.contract import Bus, BusRefused, BusUnavailable, Fenced, LeaseTaken


class LeaseBus:
    """The lease and state part of a bus, with faults that a test switches on. ``changed`` is set on every renewal."""

    def __init__(self) -> None:
        self.taken = False
        self.unavailable = False
        self.refusal = ""
        self.fenced = False
        self.held = True
        self.infos: list[Mapping[str, Any]] = []
        self.failed_renewals = 0
        self.released: list[int] = []
        self.states: dict[str, Mapping[str, Any]] = {}
        self.changed = asyncio.Event()

    def tell_restarts(self, tell: object) -> None:
        """It is never restarted."""

    async def acquire_lease(self, kind: str, name: str, info: Mapping[str, Any], *, ttl_s: float) -> int:
        if self.unavailable:
            raise BusUnavailable("gone")
        if self.taken:
            raise LeaseTaken(name)
        self.infos.append(info)
        return 7

    async def renew_lease(self, kind: str, name: str, epoch: int, info: Mapping[str, Any], *, ttl_s: float) -> bool:
        self.changed.set()
        if self.unavailable or self.refusal:
            self.failed_renewals += 1
            raise BusRefused(self.refusal) if self.refusal else BusUnavailable("no connection to redis://10.0.0.7")
        if self.fenced:
            raise Fenced("newer holder")
        self.infos.append(info)
        return self.held

    async def release_lease(self, kind: str, name: str, epoch: int) -> None:
        self.released.append(epoch)

    async def put_state(self, name: str, value: Mapping[str, Any], *, ttl_s: float | None = None) -> None:
        self.states[name] = value

    async def get_state(self, *names: str) -> list[Mapping[str, Any] | None]:
        return [self.states.get(name) for name in names]

    async def delete_state(self, *names: str) -> None:
        for name in names:
            self.states.pop(name, None)

    def said(self) -> list[str]:
        """The states in the lease, without repeats in a row."""
        states = [str(info["state"]) for info in self.infos]
        return [state for i, state in enumerate(states) if i == 0 or states[i - 1] != state]


class Waiter(Actor):
    """Serves until it is drained, and writes down what happens."""

    kind = "waiter"

    def __init__(self, bus: LeaseBus, **settings: Any) -> None:
        super().__init__(Settings(lease_ttl_s=0.2, **settings), cast(Bus, bus), "w-0")
        self.steps: list[str] = []
        self.serving = asyncio.Event()

    async def start(self) -> None:
        self.steps.append("start")

    async def serve(self) -> None:
        self.steps.append("serve")
        self.serving.set()
        await self.draining.wait()

    async def drain(self) -> None:
        self.steps.append("drain")

    async def stop(self) -> None:
        self.steps.append("stop")


async def begin(actor: Waiter) -> asyncio.Task[None]:
    """Run an actor; returns once it serves."""
    running = asyncio.create_task(actor.run())
    await actor.serving.wait()
    return running


async def end(actor: Waiter, running: asyncio.Task[None]) -> None:
    """Drain an actor, and wait for its end."""
    actor.request_drain()
    await running


async def until_beat(bus: LeaseBus) -> None:
    """Wait for one more renewal attempt."""
    bus.changed.clear()
    await bus.changed.wait()
