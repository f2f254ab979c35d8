"""An actor's lease: asked for again, given up, and orders of operators that come with it."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.actors.runtime.actor import Stopped, orders_state
from pagebus.bus.contract import Fenced
from tests.actors.runtime.lease_bus import LeaseBus, Waiter, begin, end, until_beat


class Sleeper(Waiter):
    """Acts on what it read before it was frozen, but asks for its lease first."""

    async def serve(self) -> None:
        self._renewed_s = -1000.0  # as if it had been frozen since
        self.serving.set()
        await self.confirm_lease()
        self.steps.append("act")
        await self.draining.wait()


@pytest.mark.parametrize("unavailable", [False, True])
async def test_whoever_slept_asks_for_its_lease_first(unavailable: bool) -> None:
    """Nothing is done before the lease is renewed, however long the bus is away."""
    bus = LeaseBus()
    actor = Sleeper(bus)
    running = await begin(actor)
    bus.unavailable = unavailable
    for _ in range(3 * unavailable):
        await until_beat(bus)
        assert "act" not in actor.steps
    bus.unavailable = False
    while "act" not in actor.steps:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await end(actor, running)


async def test_whoever_was_given_up_while_it_slept_ends() -> None:
    """It does nothing more."""
    bus = LeaseBus()
    actor = Sleeper(bus)
    running = await begin(actor)
    bus.fenced = True
    with pytest.raises(Fenced):
        await running
    assert "act" not in actor.steps


@pytest.mark.parametrize("succeeded", [False, True])
async def test_whoever_slept_while_the_bus_was_started_anew_waits_for_objections(succeeded: bool) -> None:
    """The bus may have forgotten who had its lease then. It does nothing before a later renewal, by when a successor
    has said so; if nobody does, it goes on."""
    bus = LeaseBus()
    actor = Sleeper(bus)
    bus.held = False
    actor.when_ready(actor._bus_restarted)
    running = await begin(actor)
    await until_beat(bus)
    bus.held, bus.fenced = True, succeeded
    assert "act" not in actor.steps
    if succeeded:
        with pytest.raises(Fenced):
            await running
    else:
        while "act" not in actor.steps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await end(actor, running)
    assert ("act" in actor.steps) is not succeeded


async def test_an_operator_can_have_an_actor_drain() -> None:
    """The order on the bus is obeyed once, with the next renewal of the lease; one to an earlier life is not."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)
    await bus.put_state(orders_state("waiter", "w-0"), {"epoch": 6, "order": "drain"})
    for _ in range(2):
        await until_beat(bus)
    assert not actor.draining.is_set()
    await bus.put_state(orders_state("waiter", "w-0"), {"epoch": 7, "order": "drain"})
    await running
    assert actor.steps == ["start", "serve", "drain", "stop"]
    assert orders_state("waiter", "w-0") not in bus.states


async def test_an_operator_can_stop_an_actor() -> None:
    """It ends at once, as if it had failed, so that its supervisor starts it again."""
    bus = LeaseBus()
    actor = Waiter(bus)
    bus.states[orders_state("waiter", "w-0")] = {"epoch": 7, "order": "stop"}
    with pytest.raises(Stopped):
        await actor.run()
    assert actor.steps == ["start", "serve", "stop"]
    assert bus.released == [7]
