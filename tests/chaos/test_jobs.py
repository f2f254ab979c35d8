"""A hundred thousand jobs beside 16 streams, and every actor killed in turn: `make jobs-stress`.

The short version of this is in test_chaos.py. ``PAGEBUS_TEST_JOBS`` says how many jobs there are.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.deployment import KINDS, Deployment, deployed
from tests.chaos.load import Answer, Load, make_jobs
from tests.chaos.queued import Queued

COUNT = int(os.environ.get("PAGEBUS_TEST_JOBS", "0"))
STREAMS = 16
MEASURED_S = float(os.environ.get("PAGEBUS_TEST_MEASURED_S", "30"))
STEP_MS = 25
GROWTH_AIMED_AT = 1.1
MOST_GROWTH = 1.2
"""Of the 99th percentile of the time between two tokens of a stream."""

pytestmark = [pytest.mark.skipif(not COUNT, reason="`make jobs-stress` only"), pytest.mark.timeout(3600)]


def token_gaps_ms(streams: Sequence[Answer], since_s: float, until_s: float) -> list[float]:
    """Times between events of streams, in order of length."""
    gaps = []
    for stream in streams:
        for before_s, after_s in zip(stream.times_s, stream.times_s[1:], strict=False):
            if since_s <= before_s and after_s <= until_s:
                gaps.append(1000 * (after_s - before_s))
    return sorted(gaps)


def percentiles(gaps_ms: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(gaps_ms, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "tokens": len(gaps_ms)}


def memory_mib(deployment: Deployment) -> dict[str, int]:
    """Resident memory of each actor."""
    found = {}
    for name, process in deployment.actors().items():
        try:
            found[name] = round(process.memory_info().rss / 2**20)
        except psutil.Error:
            continue
    return found


async def alone_ms(deployment: Deployment, load: Load) -> dict[str, float]:
    """Times between tokens of streams that have the deployment for themselves."""
    over = asyncio.Event()
    clients = asyncio.create_task(load.run(over, keyed=1, patience_s=300))
    await asyncio.sleep(5)
    began_s = time.monotonic()
    await asyncio.sleep(MEASURED_S)
    over.set()
    await clients
    return percentiles(token_gaps_ms(load.streams, began_s, time.monotonic()))


async def test_a_hundred_thousand_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All are answered, with the tokens that interactive clients get; streams go on as if there were none, by the
    target that an operator would set; actors hold no more memory than before; and a kill of any changes nothing."""

    def tell(**figures: Any) -> None:
        with capsys.disabled():
            print("\n  " + "\n  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)

    (tmp_path / "alone").mkdir()
    (tmp_path / "beside").mkdir()
    with deployed(tmp_path / "alone", step_ms=STEP_MS) as deployment:
        load = Load(deployment.url, make_jobs(STREAMS, seed=2, most_tokens=24))
        await load.learn()
        alone = await alone_ms(deployment, load)
    target_ms = f"{GROWTH_AIMED_AT * alone['p50']:.1f}"
    tell(alone=alone, itl_target_ms=target_ms)
    with deployed(tmp_path / "beside", "--itl-target-ms", target_ms, step_ms=STEP_MS) as deployment:
        load.url = deployment.url
        queued, over = Queued(deployment, load, COUNT), asyncio.Event()
        clients = asyncio.create_task(load.run(over, keyed=1, patience_s=300))
        try:
            await asyncio.sleep(5)
            before = memory_mib(deployment)
            pushed_s = await asyncio.to_thread(queued.push)
            beside_s = time.monotonic()
            await asyncio.sleep(MEASURED_S)
            beside = percentiles(token_gaps_ms(load.streams, beside_s + 2, time.monotonic()))
            await asyncio.to_thread(queued.take)
            tell(pushed=f"{COUNT} in {pushed_s:.1f} s", beside=beside, answered_meanwhile=len(queued.answers),
                 memory_before=before, memory_after=memory_mib(deployment))  # fmt: skip
            for kind in KINDS:
                deployment.kill(kind)
                await asyncio.sleep(8)
                await asyncio.to_thread(deployment.until_healthy)
            over.set()
            await clients
            await queued.collect(3000)
            tell(answered=len(queued.answers), twice=sum(queued.answers.values()) - COUNT,
                 seconds=f"{time.monotonic() - beside_s:.0f}", memory=memory_mib(deployment))  # fmt: skip
        finally:
            over.set()
            await clients
        assert load.problems == []
        assert await deployment.until_at_rest() == []
        assert deployment.stop() == 0
        assert beside["p99"] < MOST_GROWTH * alone["p99"]
