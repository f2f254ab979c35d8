"""A scheduler that is told to end: what it finishes, and what it leaves to another one."""

from __future__ import annotations

import asyncio

from pagebus.actors.scheduler.actor import SchedulerActor
from pagebus.actors.scheduler.leader import STANDBY_STATE
from pagebus.bus.memory.bus import MemoryBus
from tests.actors.scheduler.fake_model import expected_tokens
from tests.actors.scheduler.served_scheduler import NAMES, PROMPT, Deployment, ask
from tests.helpers.waiting import eventually, until


async def begin_half(deployment: Deployment) -> None:
    """An executor has given some of the 60 tokens of a request, and pauses."""
    await deployment.add_executor()
    deployment.pause_after = 10
    await deployment.send(ask("a", max_tokens=60))
    await until(lambda: len(deployment.tokens()) > 2)


async def test_draining_finishes_what_runs() -> None:
    """A drained scheduler ends after the last token of what it had taken in."""
    deployment = Deployment()
    async with deployment.running():
        await begin_half(deployment)
        deployment.scheduler.request_drain()
        deployment.pause_after = None
        await until(lambda: len(deployment.tokens()) == 60)
    assert deployment.tokens() == expected_tokens(PROMPT, 60)


async def test_draining_beside_a_standby_leaves_the_rest_to_it() -> None:
    """At once, and not after the last token: new requests would be refused until then. No token is lost."""
    deployment = Deployment()
    async with deployment.running():
        await begin_half(deployment)
        other = SchedulerActor(deployment.settings, MemoryBus(deployment.server, NAMES), "scheduler-1")
        standing = asyncio.create_task(other.run())

        async def stands_by() -> bool:
            return (await deployment.bus.get_state(STANDBY_STATE))[0] is not None

        await eventually(stands_by)
        deployment.scheduler.request_drain()
        await until(deployment.life.done)
        deployment.scheduler, deployment.life = other, standing
        deployment.pause_after = None
        await until(lambda: len(deployment.tokens()) == 60)
    assert deployment.tokens() == expected_tokens(PROMPT, 60)


async def test_draining_without_an_executor_leaves_the_rest_to_a_successor() -> None:
    """As where a deployment stops with jobs under way: nobody could compute them, so nobody waits for them."""
    deployment = Deployment()
    async with deployment.running():
        await begin_half(deployment)
        await deployment.stop_executor("gpu-0")
        await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
        deployment.scheduler.request_drain()
        await until(deployment.life.done)
        deployment.pause_after = None
        await deployment.start_scheduler()
        await deployment.add_executor("gpu-1")
        await until(lambda: len(deployment.tokens()) == 60)
    assert deployment.tokens() == expected_tokens(PROMPT, 60)
