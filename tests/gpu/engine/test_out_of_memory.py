"""A device without memory: an executor that finds none is started again until there is some; nobody loses a token."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import torch

from pagebus.actors.bench.driver.deployment import Deployment, as_served, deployed
from pagebus.actors.settings import Settings
from pagebus.bus.private_redis.server import find_redis_server
from tests.helpers.waiting import LIMIT_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH"),
    pytest.mark.filterwarnings("ignore"),
]

STREAMS, MAX_TOKENS = 16, 1500
PIECE = 256 << 20
NO_MEMORY = re.compile(r"out of memory|OutOfMemory|no GPU memory is left")


class Hog:
    """Takes the memory of the device, piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def take(self) -> None:
        """All that is free now, but for less than a piece."""
        while torch.cuda.mem_get_info()[0] > PIECE:
            try:
                self._pieces.append(torch.empty(PIECE, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                return

    def let_go(self) -> None:
        self._pieces.clear()
        torch.cuda.empty_cache()


async def ask(session: aiohttp.ClientSession, deployment: Deployment, number: int, begun: set[int]) -> int:
    """How many tokens one request gets; ``begun`` has its number from the first on."""
    body = {
        "model": "qwen", "prompt": [number + 1] * 50, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    count = 0
    async with session.post(f"{deployment.base_url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                count += sum(len(choice["token_ids"]) for choice in chunk["choices"])
                begun.add(number)
    return count


async def until(happened: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not happened():
            meanwhile()
            await asyncio.sleep(0.01)


async def lose_the_memory(folder: Path) -> tuple[list[int], str]:
    """Tokens of each request, and the log: the executor is killed, and its memory taken before the next one has it."""
    settings = Settings(model="qwen06b", served_model_name=("qwen",), max_model_len=2048, gpu_memory_utilization=0.3)
    hog, log = Hog(), folder / "serve.log"
    async with (
        deployed(as_served(settings, folder), log) as deployment,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session,
    ):
        begun: set[int] = set()
        asking = [asyncio.create_task(ask(session, deployment, number, begun)) for number in range(STREAMS)]
        await until(lambda: len(begun) == STREAMS)
        hog.take()  # not before: the first steps of a fresh executor still take memory
        assert not any(task.done() for task in asking)
        (lease,) = await deployment.bus.leases("executor")
        os.kill(int(str(lease.info["pid"])), signal.SIGKILL)
        await until(lambda: bool(NO_MEMORY.search(log.read_text())), hog.take)
        hog.let_go()
        return await asyncio.gather(*asking), log.read_text()


def test_nothing_is_lost_while_the_device_has_no_memory(tmp_path: Path) -> None:
    """Requests wait for the executor that finds memory again, and get all their tokens."""
    numbers, log = asyncio.run(lose_the_memory(tmp_path))

    assert numbers == [MAX_TOKENS] * STREAMS
    assert NO_MEMORY.search(log)
