"""A whole deployment in a thread of its own, whose executor can be held and whose actors can be killed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.process import actor_class
from pagebus.actors.runtime.single_process import make_actors
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.settings import Settings
from pagebus.bus.contract import LogEntry
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import Message, StepResult
from pagebus.bus.streams import Names
from pagebus.web.app import IngressActor
from tests.helpers import patience
from tests.helpers.vanish import vanish
from tests.helpers.waiting import LIMIT_S

T = TypeVar("T")


class HeldBus(MemoryBus):
    """Lets no result through while it is held: the scheduler plans its pipeline full, and then stands still."""

    held = False
    passes = 0
    """How many results may pass all the same."""

    async def append(self, entries: Sequence[LogEntry]) -> None:
        for entry in entries:
            if isinstance(entry.message, StepResult):
                while self.held and not self.passes:  # noqa: ASYNC110 (set from another thread)
                    await asyncio.sleep(0.002)
                self.passes = max(0, self.passes - 1)
            await super().append([entry])


class Deployment:
    """Actors of the shipped model over a bus in memory. Methods may be called from any thread."""

    def __init__(self, **settings: Any) -> None:
        options = {"device": "cpu", "threads": 1, "port": 0, "lease_ttl_s": 1.0, "swap_space": 0.0,
                   "num_gpu_blocks_override": 160, "max_num_batched_tokens": 128}  # fmt: skip
        patience.views_of_ingresses()
        self.settings = Settings(**{**options, **settings})
        self.server = MemoryServer()
        self.names = Names(self.settings.name)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runs: dict[str, asyncio.Task[None]] = {}
        self.actors: list[Actor] = []

    # -- life ---------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()
        self.do(self._start())

    def stop(self) -> None:
        self.release()
        try:
            self.do(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT_S)
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the deployment's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * LIMIT_S)

    async def _start(self) -> None:
        self.bus = HeldBus(self.server, self.names)
        self.actors = make_actors(
            self.settings, lambda kind: self.bus if kind == "executor" else MemoryBus(self.server, self.names)
        )
        for actor in self.actors:
            self._run(actor)
        await self._until(lambda: self.ingress.context is not None and not self.ingress.context.missing())
        await self._until(lambda: bool(self.core.replicas))

    async def _stop(self) -> None:
        for actor in self.actors:
            actor.request_drain()
        await asyncio.gather(*self._runs.values())
        for actor in self.actors:
            await actor.bus.close()

    def _run(self, actor: Actor) -> None:
        self._runs[actor.name] = asyncio.create_task(actor.run(), name=actor.name)

    def _actor(self, name: str) -> Actor:
        return next(actor for actor in self.actors if actor.name == name)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                for run in self._runs.values():
                    if run.done():
                        run.result()
                await asyncio.sleep(0.01)

    # -- what tests do ------------------------------------------------------------------------------------------------
    @property
    def ingress(self) -> IngressActor:
        actor = self._actor("ingress-0")
        assert isinstance(actor, IngressActor)
        return actor

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ingress.port}"

    @property
    def core(self) -> Any:
        return self._actor("scheduler-0").core  # type: ignore[attr-defined]

    @property
    def replica(self) -> Replica:
        (replica,) = self.core.replicas.values()
        assert isinstance(replica, Replica)
        return replica

    def hold(self, after: int = 0) -> None:
        """Let ``after`` more results pass, then none."""
        self.bus.passes, self.bus.held = after, True

    def release(self) -> None:
        self.bus.held = False

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        self.do(self._until(holds))

    def until_served(self, send: Callable[[], object]) -> None:
        """Send a request, and wait until it has come and ended."""
        self.hold()
        send()
        self.until(lambda: bool(self.core.requests))
        self.release()
        self.until(lambda: not self.core.requests)

    def paused(self) -> None:
        """Wait until the scheduler has planned all that it can."""
        self.until(lambda: not self.bus.passes and len(self.replica.in_flight) >= 2)

    def publish(self, stream: str, message: Message) -> None:
        self.do(self.bus.publish([(stream, message)]))

    def kill(self, name: str) -> None:
        """As near to SIGKILL as one process allows: nothing is finished, the lease is left to expire."""

        async def kill() -> None:
            actor = self._actor(name)
            await vanish(actor, self._runs.pop(name))
            await actor.bus.close()

        self.do(kill())

    def revive(self, kind: str, name: str) -> None:
        """Start an actor of this name again."""

        async def revive() -> None:
            settings = self.settings.replace(bus="memory://", actor_name=name)
            bus = HeldBus(self.server, self.names) if kind == "executor" else MemoryBus(self.server, self.names)
            if isinstance(bus, HeldBus):
                self.bus = bus
            actor = actor_class(kind)(settings, bus, name)
            self.actors = [actor if each.name == name else each for each in self.actors]
            self._run(actor)

        self.do(revive())
