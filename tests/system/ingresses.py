"""Deployments with several ingresses in one process, whose clients choose where they ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.single_process import make_actors
from pagebus.actors.scheduler.actor import SchedulerActor
from pagebus.actors.settings import Settings
from pagebus.bus.contract import Bus
from pagebus.web.app import IngressActor
from tests.helpers.oracle import make_oracle
from tests.helpers.vanish import vanish
from tests.helpers.waiting import eventually


class Deployed:
    """Some ingresses; one of each other kind behind them."""

    def __init__(self, actors: list[Actor]) -> None:
        self.actors = actors
        self.ingresses = [actor for actor in actors if isinstance(actor, IngressActor)]
        (self.scheduler,) = (actor for actor in actors if isinstance(actor, SchedulerActor))
        self._runs = {actor.name: asyncio.create_task(actor.run(), name=actor.name) for actor in actors}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{ingress.port}" for ingress in self.ingresses]

    async def answers(self) -> bool:
        """Whether all are ready, and each ingress knows that."""
        if any(actor.state != "ready" for actor in self.actors):
            return False
        async with aiohttp.ClientSession() as session:
            for url in self.urls:
                async with session.get(f"{url}/health") as response:
                    if response.status != 200:
                        return False
        return True

    async def kill(self, actor: Actor) -> None:
        """As nearly as one process allows."""
        self.actors.remove(actor)
        await vanish(actor, self._runs.pop(actor.name))
        await actor.bus.close()

    async def stop(self) -> None:
        for actor in self.actors:
            actor.request_drain()
        await asyncio.gather(*self._runs.values())
        for actor in self.actors:
            await actor.bus.close()


@contextlib.asynccontextmanager
async def deployed(
    folder: Path, open_bus: Callable[[str], Bus], *, ingresses: int = 2, **settings: object
) -> AsyncIterator[Deployed]:
    """They answer; the model is an oracle whose steps take 2 ms."""
    chosen = Settings(
        model=str(make_oracle(folder / "model", step_ms=2)), load_format="dummy", served_model_name=("oracle",), port=0,
        device="cpu", threads=1, cpu_kv_cache_gib=0.002, max_num_seqs=8, ingresses=ingresses, **settings,
    )  # type: ignore[arg-type]  # fmt: skip
    deployment = Deployed(make_actors(chosen, open_bus))
    try:
        await eventually(deployment.answers)
        yield deployment
    finally:
        await deployment.stop()
