"""Records the run that the pictures of docs/scheduling.md show: ``python -m tests.system.record_run run.jsonl.gz``.

Starts a redis-server and ``pagebus serve`` with the shipped model on the CPU, with a very small cache (112 blocks) and
a budget of 192 tokens a step, sends 24 chats over HTTP within six seconds, some with long messages, all behind one
system prompt, while ``pagebus record`` writes down what happens. Sampling is seeded; the times are the machine's.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from pagebus.bus.private_redis.server import PrivateRedis
from tests.helpers.waiting import LIMIT_S

PORT = 8177
LIMITS = {
    "--max-num-seqs": 24,
    "--num-gpu-blocks-override": 112,
    "--max-num-batched-tokens": 192,
    "--swap-space": 0.05,
    "--preemption-mode": "swap",
    "--device": "cpu",
}
SYSTEM = "You are a dictionary. Explain each word that you are asked for in one short sentence, with an example. " * 2
WORDS = ("harbour", "lantern", "meadow", "orchard", "river", "valley", "winter", "window", "candle", "castle")
CHATS, SECONDS = 24, 6.0


async def chat(session: aiohttp.ClientSession, index: int, rng: random.Random) -> None:
    """One request; every fourth has a message of some 200 tokens."""
    words = rng.sample(WORDS, 4) if index % 4 else rng.sample(WORDS, 10) * 6
    at_s, max_tokens = rng.uniform(0, SECONDS), rng.randrange(40, 160)
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What do these words mean: {', '.join(words)}?"},
        ],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": index,
    }
    await asyncio.sleep(at_s)
    async with session.post(f"http://127.0.0.1:{PORT}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == max_tokens


async def start(*arguments: object) -> asyncio.subprocess.Process:
    """A command of Pagebus."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagebus.actors.commands.cli", *map(str, arguments)
    )


async def until(met: Callable[[], bool]) -> None:
    for _ in range(600):
        if await asyncio.to_thread(met):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError


def is_healthy() -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=LIMIT_S)
    except OSError:
        return False
    return True


def pack(raw: Path, path: Path) -> None:
    path.write_bytes(gzip.compress(raw.read_bytes(), mtime=0))


async def record(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "run.jsonl"
        redis = PrivateRedis(Path(folder) / "redis")
        url = await redis.start()
        settings = [each for pair in LIMITS.items() for each in pair]
        server = await start("serve", "--bus", url, "--name", "run", "--port", PORT, *settings)
        await until(is_healthy)
        recorder = await start("record", "--bus", url, "--name", "run", "--out", raw)
        await until(raw.exists)  # it is made once the recorder reads
        rng = random.Random(1)
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(chat(session, index, rng) for index in range(CHATS)))
        await asyncio.sleep(1)
        for process in (recorder, server):
            process.send_signal(signal.SIGINT if process is recorder else signal.SIGTERM)
            await asyncio.wait_for(process.wait(), LIMIT_S)
        await redis.stop()
        await asyncio.to_thread(pack, raw, path)


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[1])))
