"""A deployment in which every actor may die at any moment: who does is started again, as by a supervisor."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.runtime.actor import Actor, describe
from pagebus.actors.runtime.process import actor_class
from pagebus.actors.scheduler.actor import SchedulerActor
from pagebus.actors.settings import Settings
from pagebus.bus.contract import Fenced, ServerRolledBack
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names
from tests.dst.loop import Process, SimulatedLoop
from tests.dst.network import Network, SimulatedBus
from tests.dst.oracles.pulls import Links

WAVES = (("ingress", "jobs"), ("tokenizer", "scheduler", "detokenizer"), ("executor",))
FAULT = "an injected fault of the device"


@dataclass(eq=False)
class Life:
    """One life of an actor."""

    kind: str
    name: str
    process: Process
    bus: SimulatedBus
    actor: Actor
    run: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False


class World:
    """``counts`` says how many actors there are of each kind. ``problems`` are broken promises."""

    def __init__(
        self,
        loop: SimulatedLoop,
        rng: random.Random,
        settings: Settings,
        counts: dict[str, int],
        tell: Callable[[str], None],
        links: Links | None = None,
    ) -> None:
        self.loop, self.rng, self.settings, self.counts = loop, rng, settings, counts
        self.links = links
        if links is not None:
            links.gave_up = self._gave_up
        self.tell = tell
        self.names = Names(settings.name)
        self.bus_ahead_s = 0.0
        self.server = MemoryServer(lambda: loop.now_s + self.bus_ahead_s)
        self.network = Network(loop, rng, self.server)
        self.network.tell = tell
        self.lives: dict[str, Life] = {}
        self.problems: list[str] = []
        self.restart_s = (0.05, 3.0)
        self.stopping = self.healed = False
        self._supervisors: list[asyncio.Task[None]] = []
        self._ghosts: list[Life] = []
        loop.set_exception_handler(self._unhandled)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.problems.append(f"unhandled: {context['message']} {describe(error) if error else ''}")

    def _gave_up(self, address: str, epoch: int) -> bool:
        """Whether the scheduler of this epoch counts no more on the executor with this cache, or is gone itself."""
        for life in self.living:
            if isinstance(life.actor, SchedulerActor) and life.actor.epoch == epoch:
                return address not in {each.kv_address for each in life.actor.core.replicas.values()}
        return True

    # -- lives --------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Every actor gets a supervisor."""
        for kind, count in self.counts.items():
            for number in range(count):
                self._supervisors.append(asyncio.create_task(self._keep(kind, f"{kind}-{number}")))

    async def _keep(self, kind: str, name: str) -> None:
        while not self.stopping:
            life = self._begin(kind, name)
            await life.ended.wait()
            if self.stopping:
                return
            if self.rng.random() < 0.5:
                self._release(life)
            await asyncio.sleep(self.rng.uniform(*self.restart_s))

    def _begin(self, kind: str, name: str) -> Life:
        process = self.loop.process(name)
        bus = SimulatedBus(self.network, self.names, name)
        settings = self.settings.replace(actor_name=name)
        actor = process.context.run(actor_class(kind), settings, bus, name)
        life = self.lives[name] = Life(kind, name, process, bus, actor)
        life.run = self.loop.create_task(self._live(life), name=name, context=process.context)
        return life

    async def _live(self, life: Life) -> None:
        try:
            await life.actor.run()
        except (Exception, asyncio.CancelledError) as error:
            if not life.killed and not self._is_legitimate(error):
                self.problems.append(f"{life.name} ended: {describe(error)}")
            self.tell(f"{life.name} ends: {describe(error)}")
        else:
            if not life.actor.draining.is_set() and not life.killed:
                self.problems.append(f"{life.name} ended for no reason")
        finally:
            life.bus.sever()
            life.ended.set()

    def _is_legitimate(self, error: BaseException) -> bool:
        """Who has been replaced, has lost what it had written, or has a fault, has to end."""
        return isinstance(error, Fenced | ServerRolledBack) or (isinstance(error, EngineError) and FAULT in str(error))

    def _release(self, life: Life) -> None:
        """A supervisor gives up the lease of a dead child."""
        key = self.names.lease(life.kind, life.actor.lease_name())
        lease = self.server.leases.get(key)
        if lease is not None and lease.epoch == life.actor.epoch:
            del self.server.leases[key]

    # -- what may happen to them --------------------------------------------------------------------------------------
    def kill(self, life: Life) -> None:
        """SIGKILL: nothing it does from now on reaches anybody."""
        if life.killed or life.ended.is_set() or life.run is None:
            return
        self.tell(f"KILL {life.name}")
        life.killed = True
        if (engine := getattr(life.actor, "_engine", None)) is not None:
            engine.die()
        life.process.frozen = False
        life.bus.sever()
        for listener in list(self.loop.listeners.values()):
            if listener.process is life.process:
                listener.break_all()
        life.run.cancel()
        self._ghosts.append(life)
        life.ended.set()

    def freeze(self, life: Life, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if life.process.frozen:
            return
        self.tell(f"FREEZE {life.name} for {seconds:.2f} s")
        life.process.frozen = True
        self.loop.call_later(seconds, self.thaw, life)

    def thaw(self, life: Life) -> None:
        if life.process.frozen:
            self.tell(f"THAW {life.name}")
            life.process.frozen = False

    def drain(self, life: Life) -> None:
        """SIGTERM."""
        self.tell(f"DRAIN {life.name}")
        self.loop.call_soon(life.actor.request_drain, context=life.process.context.copy())

    def at_random_turn(self, life: Life, call: Callable[[Life], None], most: int) -> None:
        """Do something to an actor after some more of its callbacks, wherever that is."""
        life.process.fuse = self.rng.randint(1, most)
        life.process.on_fuse = lambda: call(life)

    @property
    def living(self) -> list[Life]:
        return [life for life in self.lives.values() if not life.ended.is_set()]

    # -- the end ------------------------------------------------------------------------------------------------------
    def heal(self) -> None:
        """No more faults."""
        self.tell("HEAL")
        self.healed = True
        self.network.heal()
        self.restart_s = (0.05, 0.2)
        for life in self.lives.values():
            life.process.fuse = 0
            self.thaw(life)

    async def stop(self) -> None:
        """SIGTERM to all, as the supervisor does, the ingress first."""
        self.stopping = True
        for kinds in WAVES:
            lives = [life for life in self.living if life.kind in kinds]
            for life in lives:
                self.drain(life)
            for life in lives:
                await life.ended.wait()
        left = [*self._supervisors, *(task for life in self._ghosts for task in self.loop.tasks_of(life.process))]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.network.close()

    def run(self, coro: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(coro)
