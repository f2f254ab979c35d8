"""Gauges fall when requests end, without waiting for the next time that everything is published."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.actors.runtime import actor
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import eventually
from tests.system.serving import serving

GAUGES = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "pagebus:open_requests",
          "pagebus:detokenizer_sequences")  # fmt: skip


async def test_gauges_fall(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the scheduler, the detokenizer and the ingress: though the next second were an hour away."""
    folder = make_reference(tmp_path / "model", REFERENCE_CONFIGS[0])
    async with serving(folder) as client:

        async def shown() -> list[float]:
            return [await client.metric(lambda line, name=name: line.startswith(name)) for name in GAUGES]

        async def have_risen() -> bool:
            return all(await shown())

        async def have_fallen() -> bool:
            return await shown() == [0] * len(GAUGES)

        enough = asyncio.Event()

        async def ask() -> None:
            while not enough.is_set():
                await client.completion([1, 2, 3], max_tokens=400, ignore_eos=True)

        await eventually(have_fallen)
        asking = asyncio.create_task(ask())
        await eventually(have_risen)
        monkeypatch.setattr(actor, "METRICS_INTERVAL_S", 3600.0)
        enough.set()
        await asking
        await eventually(have_fallen)
