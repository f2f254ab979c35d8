"""All actors over a Redis whose connections break all the time, or that cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pagebus.actors.runtime.single_process import make_actors
from pagebus.actors.settings import Settings
from pagebus.bus.private_redis.server import PrivateRedis
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from pagebus.web.app import IngressActor
from tests.bus.redis.breaking_proxy import BreakingProxy
from tests.chaos.load import Load, make_jobs
from tests.chaos.structured import structured
from tests.helpers.oracle import make_oracle
from tests.helpers.waiting import LIMIT_S

CHANCE = 0.02
"""Of each exchange, to lose its connection."""
CLIENTS = 24
ANSWERS = 40
FULL = os.environ.get("PAGEBUS_TEST_CHAOS") == "full"


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


@contextlib.asynccontextmanager
async def loaded(server: PrivateRedis, folder: Path, *, seed: int = 0) -> AsyncIterator[tuple[BreakingProxy, Load]]:
    """A deployment behind a proxy, and clients that know their answers. All of them must get these, and nothing may be
    left."""
    settings = Settings(
        model=str(make_oracle(folder / "model", step_ms=5)), load_format="dummy", served_model_name=("oracle",), port=0,
        device="cpu", threads=1, cpu_kv_cache_gib=0.002, swap_space=0.002, max_num_seqs=32, lease_ttl_s=30.0,
    )  # fmt: skip
    proxy = BreakingProxy(server.url.removeprefix("unix://"), folder / "proxy.sock", seed=seed)
    async with proxy.running(), deployed(settings, proxy.url) as (url, bus):
        load = Load(url, structured(make_jobs(CLIENTS, seed=2, most_tokens=48)))
        await load.learn()
        over = asyncio.Event()
        clients = asyncio.create_task(load.run(over, keyed=0.5, patience_s=60.0))
        yield proxy, load
        over.set()
        await clients
        proxy.chance = 0.0
        assert load.problems == []
        streams = (bus.names.requests, bus.names.tokenized, bus.names.control, bus.names.journal)
        async with asyncio.timeout(LIMIT_S):
            while any([await bus.length(stream) for stream in streams]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def until_answered(load: Load, answers: int) -> None:
    """Wait until clients have so many answers, or a problem."""
    while load.answers < answers and not load.problems:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", range(8 if FULL else 1))
async def test_connections_break(
    private_redis: PrivateRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One in fifty exchanges loses its connection, before or after it was applied: no answer changes."""
    for module in ("pagebus.actors.runtime.actor", "pagebus.actors.runtime.bus_retry", "pagebus.actors.executor.actor"):
        monkeypatch.setattr(f"{module}.RETRY_S", 0.01)
    async with loaded(private_redis, tmp_path, seed=seed) as (proxy, load):
        proxy.chance = CHANCE
        await until_answered(load, ANSWERS)
        assert proxy.broken > 3, "hardly anything was broken"


@pytest.mark.skipif(not FULL, reason="part of `make chaos` only")
@pytest.mark.parametrize("cut_s", [1.0, 10.0])
async def test_the_network_is_cut(private_redis: PrivateRedis, tmp_path: Path, cut_s: float) -> None:
    """Nothing arrives and nobody is told. After three seconds new requests are refused; then all goes on."""
    async with loaded(private_redis, tmp_path) as (proxy, load):
        await until_answered(load, CLIENTS)
        proxy.passes.clear()
        await asyncio.sleep(cut_s)
        async with aiohttp.ClientSession() as session, session.get(f"{load.url}/readyz") as response:
            assert response.status == (503 if cut_s > 3 else 200)
        proxy.passes.set()
        await until_answered(load, load.answers + CLIENTS)
