"""All actors over a Redis whose connections break all the time, before or after a command was applied."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.settings import Settings
from actors.single_process import make_actors
from bus.private_redis import PrivateRedis
from bus.redis_bus import RedisBus
from bus.streams import Names
from tests.bus.breaking_proxy import BreakingProxy
from tests.chaos.load import Load, make_jobs
from tests.oracle import make_oracle
from web.app import IngressActor

CHANCE = 0.02
"""Of each exchange, to lose its connection."""
CLIENTS = 24
ANSWERS = 40
SEEDS = 8 if os.environ.get("PAGEBUS_TEST_CHAOS") == "full" else 1


@contextlib.asynccontextmanager
async def deployed(settings: Settings, url: str) -> AsyncIterator[tuple[str, RedisBus]]:
    """All actors as tasks; where they serve, and a bus of the test's own."""
    buses: list[RedisBus] = []

    def open_bus(kind: str) -> RedisBus:
        buses.append(RedisBus(url, Names(settings.name), client_name=kind))
        return buses[-1]

    actors = make_actors(settings, open_bus)
    bus = open_bus("test")
    runs = [asyncio.create_task(actor.run(), name=actor.name) for actor in actors]
    try:
        while any(actor.state != "ready" for actor in actors):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        (port,) = [actor.port for actor in actors if isinstance(actor, IngressActor)]
        yield f"http://127.0.0.1:{port}", bus
        for actor in actors:
            actor.request_drain()
        await asyncio.gather(*runs)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        for each in buses:
            await each.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_answer_changes(
    private_redis: PrivateRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every client gets the very answer that it had before, and every stream is empty afterwards."""
    for module in ("actors.actor", "actors.scheduler.actor", "actors.executor.actor", "actors.tokenizer.actor",
                   "actors.detokenizer.actor", "web.inbox"):  # fmt: skip
        monkeypatch.setattr(f"{module}.RETRY_S", 0.01)
    model = make_oracle(tmp_path / "model", step_ms=5)
    settings = Settings(
        model=str(model), load_format="dummy", served_model_name=("oracle",), device="cpu", threads=1, port=0,
        cpu_kv_cache_gib=0.002, swap_space=0.002, max_num_seqs=32, lease_ttl_s=30.0,
    )  # fmt: skip
    proxy = BreakingProxy(private_redis.url.removeprefix("unix://"), tmp_path / "proxy.sock", seed=seed)
    async with proxy.running(), deployed(settings, proxy.url) as (url, bus):
        load = Load(url, make_jobs(CLIENTS, seed=2, most_tokens=48))
        await load.learn()
        proxy.chance = CHANCE
        over = asyncio.Event()
        clients = asyncio.create_task(load.run(over, keyed=0.5, patience_s=60.0))
        while load.answers < ANSWERS and not load.problems:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        over.set()
        await clients
        proxy.chance = 0.0
        assert load.problems == []
        assert proxy.broken > 10
        streams = (bus.names.requests, bus.names.tokenized, bus.names.control, bus.names.journal)
        async with asyncio.timeout(45):
            while any([await bus.length(stream) for stream in streams]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
