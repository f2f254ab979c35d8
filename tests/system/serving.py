"""A whole deployment in one process, HTTP included, for tests that speak to it as clients do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.single_process import make_actors
from pagebus.actors.settings import Settings
from pagebus.bus.contract import Bus
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.web.app import IngressActor
from tests.helpers import patience
from tests.helpers.vanish import vanish
from tests.helpers.waiting import eventually


class Client:
    """Speaks HTTP to an ingress."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, actors: list[Actor], runs: list[asyncio.Task[None]]
    ) -> None:
        self.url = url
        self._session = session
        self.actors = {actor.kind: actor for actor in actors}
        """One of each kind."""
        self.executors = {actor.name: actor for actor in actors if actor.kind == "executor"}
        self._all, self._runs = actors, runs

    async def replace(self, kind: str, bus: Bus) -> None:
        """End an actor as SIGKILL would, as nearly as one process allows; another takes its place over ``bus``."""
        actor = self.actors[kind]
        place = self._all.index(actor)
        await vanish(actor, self._runs[place])
        await actor.bus.close()
        await bus.connect()
        self.actors[kind] = self._all[place] = type(actor)(actor.settings, bus, f"{actor.name}-again")
        self._runs[place] = asyncio.create_task(self._all[place].run(), name=self._all[place].name)

    def check(self) -> None:
        """Raises what ended an actor, if one has ended."""
        for run in self._runs:
            if run.done():
                run.result()

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer of a call that works."""
        async with self._session.post(f"{self.url}/v1/{path}", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def send(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and answer of a path that has no version in front."""
        async with self._session.post(f"{self.url}/{path}", json=body) as response:
            return response.status, await response.json()

    async def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a call that does not."""
        async with self._session.post(f"{self.url}/v1/{path}", json=body) as response:
            assert response.status == 400
            error: dict[str, Any] = (await response.json())["error"]
            return error

    async def json(self, path: str) -> Any:
        """What a path answers."""
        async with self._session.get(self.url + path) as response:
            return await response.json()

    async def get(self, path: str) -> int:
        """The status of a path."""
        async with self._session.get(self.url + path) as response:
            await response.read()
            return response.status

    async def status(self, path: str, request_id: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer of a call with an id of the client's choice."""
        headers = {"X-Request-Id": request_id}
        async with self._session.post(f"{self.url}/v1/{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, without its end mark."""
        async with self._session.post(f"{self.url}/v1/{path}", json={**body, "stream": True}) as response:
            text = await response.text()
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    async def completion(self, prompt: Any, **body: Any) -> dict[str, Any]:
        return await self.post("completions", prompt=prompt, **{"temperature": 0, **body})

    async def metric(self, wanted: Callable[[str], bool]) -> float:
        """Sum of the metrics whose name (with labels) is wanted."""
        async with self._session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#") and wanted(line))


@contextlib.asynccontextmanager
async def serving(
    model: Path, *, open_bus: Callable[[str], Bus] | None = None, **options: Any
) -> AsyncIterator[Client]:
    """All actors of a deployment, ready to answer; over a memory bus unless ``open_bus``, which is told the
    kind of each, says otherwise."""
    patience.views_of_ingresses()
    settings = Settings(**{"model": str(model), "device": "cpu", "threads": 1, "port": 0, **options})
    server = MemoryServer()
    actors = make_actors(settings, open_bus or (lambda _: MemoryBus(server)))
    for actor in actors:
        await actor.bus.connect()
    runs = [asyncio.create_task(actor.run(), name=actor.name) for actor in actors]
    ingress = next(actor for actor in actors if isinstance(actor, IngressActor))

    async def is_ready() -> bool:
        for run in runs:
            if run.done():
                run.result()
        return ingress.context is not None and ingress.port is not None and not ingress.context.missing()

    try:
        await eventually(is_ready)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            yield Client(f"http://127.0.0.1:{ingress.port}", session, actors, runs)
    finally:
        for actor in actors:
            actor.request_drain()
        await asyncio.gather(*runs)
        for actor in actors:
            await actor.bus.close()
