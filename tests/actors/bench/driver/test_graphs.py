"""Benchmarks begin when CUDA graphs are captured."""

from __future__ import annotations

import argparse
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from pagebus.actors.bench.command import add_bench
from pagebus.actors.bench.driver import graphs
from pagebus.actors.bench.driver.deployment import BenchError, Deployment
from pagebus.actors.bench.driver.graphs import Look, graphs_in, told_by_lease, told_by_metrics, until_captured
from pagebus.actors.bench.driver.load import Spec
from pagebus.actors.settings.command_line import Commands
from pagebus.actors.telemetry.metrics import Metrics, render
from pagebus.actors.telemetry.progress import Progress
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "POLL_S", 0.0)


def saying(*counts: tuple[float, float] | None) -> tuple[Look, Iterator[tuple[float, float] | None]]:
    """Says one after the other; and what it has not said yet."""
    left = iter(counts)

    async def look() -> tuple[float, float] | None:
        return next(left)

    return look, left


async def waited(look: Look, limit_s: float = 60.0) -> list[str]:
    """What is shown while waiting."""
    shown = io.StringIO()
    await until_captured(look, Progress(shown, terminal=False), limit_s)
    return shown.getvalue().splitlines()


async def test_it_waits_until_all_are_captured() -> None:
    """And shows how far they are; nothing is asked afterwards."""
    look, left = saying((12, 96), (48, 96), (96, 96), (0, 1))
    assert await waited(look) == ["capturing CUDA graphs: 12%", "capturing CUDA graphs: 50%"]
    assert list(left) == [(0, 1)]


async def test_who_says_nothing_is_not_waited_for() -> None:
    """A CPU, or another server; or an executor that is gone meanwhile."""
    look, left = saying(None, (0, 1))
    assert await waited(look) == []
    assert list(left) == [(0, 1)]


async def test_there_is_a_limit() -> None:
    """The error says how far they were, and what to do."""
    with pytest.raises(BenchError, match=r"only 12 of 96 .* --no-wait-for-graphs"):
        await waited(saying((12, 96))[0], limit_s=0.0)


async def test_the_lease_tells() -> None:
    """That of the executor which is measured."""
    bus = MemoryBus(MemoryServer(), Names())
    deployment = Deployment(
        bus=bus, bus_url="", names=Names(), executor="a", scheduler="", detokenizers=(), info={}, base_url="",
        started_s=0.0, redis_s=0.0, ready_s=0.0, log=Path(),
    )  # fmt: skip
    look, seen = told_by_lease(deployment), []
    counts = {"num_graphs": 3, "num_planned_graphs": 9}
    for name, info in (("b", counts), ("a", {}), ("a", counts)):
        epoch = await bus.acquire_lease("executor", name, info, ttl_s=60.0)
        seen.append(await look())
        await bus.release_lease("executor", name, epoch)
    assert seen == [None, None, (3, 9)]


@pytest.fixture
async def server() -> AsyncIterator[tuple[list[tuple[int, str]], str]]:
    """Status and text of ``/metrics``, to be changed; and the server's URL."""
    said = [(200, "")]

    async def answer(request: web.Request) -> web.Response:
        status, text = said[-1]
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield said, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_the_metrics_tell(server: tuple[list[tuple[int, str]], str]) -> None:
    """Of all executors together; a server without that metric, or without metrics, says nothing."""
    said, url = server
    look = told_by_metrics(Spec(base_url=url, backend="openai", endpoint="/v1/completions", model="", workload="chat"))
    assert await look() is None
    said.append((404, "not found"))
    assert await look() is None
    metrics = Metrics()
    for engine, captured in (("a", 5), ("b", 96)):
        for state, count in (("captured", captured), ("planned", 96)):
            metrics.gauge("pagebus:cuda_graphs", "Graphs.", engine=engine, state=state).set(count)
    said.append((200, render([metrics.snapshot()], {"model_name": "m"})))
    assert await look() == graphs_in(said[-1][1]) == (101, 192)
    nobody = Spec(base_url="http://127.0.0.1:1", backend="", endpoint="", model="", workload="")
    assert await told_by_metrics(nobody)() is None


@pytest.mark.parametrize("benchmark", ["engine", "serve"])
def test_it_can_be_left_out(benchmark: str) -> None:
    """What comes right after a start can be measured, too."""
    parser = argparse.ArgumentParser()
    add_bench(Commands(parser))
    assert parser.parse_args(["bench", benchmark]).wait_for_graphs
    assert not parser.parse_args(["bench", benchmark, "--no-wait-for-graphs"]).wait_for_graphs
