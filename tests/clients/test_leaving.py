"""Clients that leave: whatever they had comes back."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.helpers.waiting import LIMIT_S, eventually

REQUESTS = 200
AT_ONCE = 32
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


async def leave(client: httpx.AsyncClient, body: dict[str, object], chunks: int) -> None:
    """Start a stream and break the connection after ``chunks`` chunks (0: while it is queued or read)."""
    async with client.stream("POST", "/completions", json=body) as response:
        assert response.status_code == 200
        if chunks:
            read = 0
            async for _ in response.aiter_lines():
                read += 1
                if read >= chunks:
                    return


async def held(base_url: str) -> dict[str, float]:
    """What requests hold now, as the metrics say."""
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        text = (await client.get(base_url.removesuffix("/v1") + "/metrics")).text
    values = dict.fromkeys(HELD, 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in values:
            values[name] += float(line.rsplit(" ", 1)[1])
    return values


async def test_two_hundred_clients_that_leave_keep_nothing(base_url, expects):
    """After 200 streams broken at random moments no request runs or waits, and no block is held."""
    if not expects.is_whole:
        pytest.skip("needs a scheduler with metrics")
    rng = random.Random(5)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient) -> None:
        prompt = "word " * rng.randint(1, 150)
        body = {"model": expects.model, "prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with gate:
            await leave(client, body, rng.choice((0, 0, 1, 5, 20)))

    async with httpx.AsyncClient(base_url=base_url, timeout=LIMIT_S) as client:
        await asyncio.gather(*(one(client) for _ in range(REQUESTS)))

    async def nothing_held() -> bool:
        return await held(base_url) == dict.fromkeys(HELD, 0.0)

    await eventually(nothing_held, look_s=0.2)  # metrics are published once a second
