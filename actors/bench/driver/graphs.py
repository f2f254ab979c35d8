"""Waiting for CUDA graphs: all but a few are captured beside the first steps of an executor, and slow these down."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import aiohttp

from pagebus.actors.bench.driver.deployment import BenchError, Deployment
from pagebus.actors.bench.driver.load import Spec
from pagebus.actors.telemetry.progress import Progress, graphs_of

LIMIT_S = 120.0
POLL_S = 0.1
SAMPLE = re.compile(r'^pagebus:cuda_graphs\{.*\bstate="(captured|planned)".*\} (\S+)$', re.MULTILINE)

Look = Callable[[], Awaitable[tuple[float, float] | None]]
"""Captured graphs and their total; None where there are none or the number is unknown."""


async def until_captured(look: Look, progress: Progress, limit_s: float = LIMIT_S) -> None:
    """Wait while graphs are being captured.

    Raises:
        BenchError: it takes longer than ``limit_s``.
    """
    deadline_s = time.monotonic() + limit_s
    while (graphs := await look()) is not None and graphs[0] < graphs[1]:
        captured, planned = graphs
        if time.monotonic() >= deadline_s:
            raise BenchError(
                f"only {captured:.0f} of {planned:.0f} CUDA graphs were captured within {limit_s:.0f} s; "
                "--no-wait-for-graphs measures without them"
            )
        progress.show("capturing CUDA graphs", captured / planned)
        await asyncio.sleep(POLL_S)


def told_by_lease(deployment: Deployment) -> Look:
    """What the executor's lease says."""

    async def look() -> tuple[float, float] | None:
        infos = [lease.info for lease in await deployment.bus.leases("executor") if lease.name == deployment.executor]
        return graphs_of(infos[0]) if infos else None

    return look


def told_by_metrics(spec: Spec) -> Look:
    """What the server's ``/metrics`` say of all its executors; other servers than ours say nothing."""

    async def look() -> tuple[float, float] | None:
        try:
            async with (
                aiohttp.ClientSession(headers=spec.headers) as session,
                session.get(f"{spec.base_url.rstrip('/')}/metrics") as response,
            ):
                return graphs_in(await response.text())
        except (aiohttp.ClientError, UnicodeDecodeError):
            return None

    return look


def graphs_in(metrics: str) -> tuple[float, float] | None:
    """Captured and planned graphs in Prometheus text."""
    counts = {"captured": 0.0, "planned": 0.0}
    samples = SAMPLE.findall(metrics)
    for state, value in samples:
        counts[state] += float(value)
    return (counts["captured"], counts["planned"]) if samples else None
