"""An ingress, jobs actors and the store that they share, spoken to by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
from openai.types.batch_usage import BatchUsage, InputTokensDetails, OutputTokensDetails

from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.jobs.actor import JobsActor
from tests.helpers.waiting import LIMIT_S, until
from tests.web.fake_backend import CACHED_TOKENS, MODEL, SENTENCE, FakeBackend, Served, start_served

URL = "/v1/chat/completions"


class World:
    """An ingress, a jobs actor and a store that they share."""

    def __init__(self, folder: Path, served: Served, server: MemoryServer) -> None:
        self.folder, self.served, self.server = folder, served, server
        self.client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
        self.jobs: list[tuple[JobsActor, asyncio.Task[None]]] = []

    @property
    def backend(self) -> FakeBackend:
        return self.served.backend

    async def begin(self, **settings: Any) -> None:
        """Start a jobs actor."""
        options = {"files_dir": str(self.folder), "lease_ttl_s": 60.0} | settings
        actor = JobsActor(Settings(**options), MemoryBus(self.server), f"jobs-{len(self.jobs)}", model=MODEL)
        self.jobs.append((actor, asyncio.create_task(actor.run())))
        await until(lambda: actor.state == "ready")

    async def leave(self) -> None:
        """Drain the jobs actors: whoever comes next goes on."""
        for actor, task in self.jobs:
            actor.request_drain()
            await task
            await actor.bus.close()
        self.jobs.clear()

    async def upload(self, *lines: dict[str, Any] | str) -> str:
        text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
        return (await self.client.files.create(file=("in.jsonl", text.encode()), purpose="batch")).id

    async def batch(self, file_id: str, **options: Any) -> str:
        options = {"endpoint": URL, "completion_window": "24h"} | options
        return (await self.client.batches.create(input_file_id=file_id, **options)).id

    async def ended(self, batch_id: str) -> openai.types.Batch:
        """Wait for the end of a batch."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                if batch.status in ("failed", "completed", "expired", "cancelled"):
                    return batch
                await asyncio.sleep(0.02)

    async def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """The lines of an output file, by custom id."""
        if file_id is None:
            return {}
        text = (await self.client.files.content(file_id)).text
        lines = [json.loads(line) for line in text.splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


def ask(custom_id: str, **body: Any) -> dict[str, Any]:
    question = {"messages": [{"role": "user", "content": custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": question}


def usage_of(count: int) -> BatchUsage:
    """What so many answers to :func:`ask` come to."""
    cached, prompt, output = CACHED_TOKENS * count, 2 * count, len(SENTENCE) * count
    return BatchUsage(
        input_tokens=prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=cached),
        output_tokens=output,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=prompt + output,
    )


@asynccontextmanager
async def world_in(folder: Path, **settings: Any) -> AsyncIterator[World]:
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), files_dir=str(folder), **settings)
    world = World(folder, served, server)
    try:
        yield world
    finally:
        await world.client.close()
        await world.leave()
        await served.stop()
