"""All actors in one process over the memory bus: what `pagebus serve` does where there is no redis-server.

The actors, their settings, messages and drain are those of the processes; what is missing is what processes give: an
actor cannot be restarted alone, and all of them share one interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.process import EXIT_OK, StopSignal, actor_class, exit_code
from pagebus.actors.runtime.readiness import where_it_answers
from pagebus.actors.runtime.supervisor import POLL_S, WAVES
from pagebus.actors.settings import KINDS, Settings
from pagebus.actors.telemetry import logs
from pagebus.actors.telemetry.progress import Progress
from pagebus.bus.contract import Bus, LeaseInfo
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names


def make_actors(settings: Settings, open_bus: Callable[[str], Bus]) -> list[Actor]:
    """All actors of ``settings``, each with its own bus object: ``open_bus`` gets the kind."""
    counts = settings.counts | {"scheduler": 1}
    names = [(kind, f"{kind}-{i}") for kind in KINDS for i in range(counts[kind])]
    own = settings.replace(bus="memory://")
    return [actor_class(kind)(own.replace(actor_name=name), open_bus(kind), name) for kind, name in names]


class SingleProcess:
    """Runs actors as tasks of this loop until told to stop or until one of them fails."""

    def __init__(
        self,
        settings: Settings,
        progress: Progress,
        on_ready: Callable[[list[str]], None],
        server: MemoryServer | None = None,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._on_ready = on_ready
        self._log = logs.get_logger(actor="serve")
        self._server = server or MemoryServer()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.actors: Sequence[Actor] = ()
        self.error: BaseException | None = None
        """The error that ended an actor, once :meth:`run` has returned."""

    async def run(self, stop: StopSignal) -> int:
        """Run until a signal (0), a failed actor (1) or a hopeless setting (2); returns that exit code."""
        try:
            self.actors = make_actors(self._settings, lambda _: MemoryBus(self._server, Names(self._settings.name)))
        except Exception as error:
            self.error = error
            return exit_code(error, self._log)
        self._tasks = {actor.name: asyncio.create_task(actor.run(), name=actor.name) for actor in self.actors}
        announcing = asyncio.create_task(self._announce(), name="announce")
        waiting = asyncio.create_task(stop.event.wait(), name="stop")
        try:
            await asyncio.wait({announcing, waiting, *self._tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
            if announcing.done():
                announcing.result()
        finally:
            announcing.cancel()
            waiting.cancel()
            await asyncio.gather(announcing, waiting, return_exceptions=True)
            self._progress.done()
            code = self._exit_code()
            await self._drain()
        return code

    def _exit_code(self) -> int:
        errors = [task.exception() for task in self._tasks.values() if task.done() and not task.cancelled()]
        codes = [exit_code(error, self._log) for error in errors if error is not None]
        self.error = next((error for error in errors if error is not None), None)
        return codes[0] if codes else EXIT_OK

    async def _announce(self) -> None:
        while True:
            if addresses := await where_it_answers(self._settings, self._server_leases(), self._progress):
                break
            await asyncio.sleep(POLL_S)
        self._progress.done()
        self._on_ready([f"{host}:{port}" for host, port in addresses])
        await asyncio.Event().wait()

    def _server_leases(self) -> list[LeaseInfo]:
        return [LeaseInfo(actor.kind, actor.lease_name(), actor.epoch, actor.lease_info()) for actor in self.actors]

    async def _drain(self) -> None:
        """The same order as the supervisor's; each actor limits its own drain."""
        for wave in WAVES:
            actors = [actor for actor in self.actors if actor.kind in wave]
            for actor in actors:
                actor.request_drain()
            await asyncio.gather(*(self._tasks[actor.name] for actor in actors), return_exceptions=True)
        for actor in self.actors:
            with contextlib.suppress(Exception):
                await actor.bus.close()
