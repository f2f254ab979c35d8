"""What looking costs: throughput of a deployment with pages connected and without, in turn.

``python -m tests.browser.bench_watched [--model qwen06b] [--clients 64] [--pages 5]``. A page here is what reads
``/api/events`` as fast as it comes; drawing is the reader's own business.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from pathlib import Path

import aiohttp

from actors.bench.deployment import Deployment, as_served, deployed, scratch
from actors.settings import Settings

READER = "import sys, urllib.request as u\nr = u.urlopen(sys.argv[1])\nwhile r.read1(1 << 16): pass"
TOKENS = "vllm:generation_tokens_total"
BUSY = "pagebus:scheduler_busy_seconds_total"


async def client(
    session: aiohttp.ClientSession, target: Deployment, dice: random.Random, arguments: argparse.Namespace
) -> None:
    """Requests of random tokens, one after another."""
    while True:
        ids = [dice.randrange(256, target.vocab_size) for _ in range(arguments.prompt_tokens)]
        body = {"prompt": ids, "max_tokens": dice.randint(1, 2 * arguments.output_tokens), "ignore_eos": True}
        async with session.post(f"{target.base_url}/v1/completions", json=body) as response:
            await response.read()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}")


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The tokens generated so far, and how long the scheduler was busy."""
    async with session.get(f"{url}/metrics") as response:
        lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {name: sum(float(value) for key, value in lines if key.split("{")[0] == name) for name in (TOKENS, BUSY)}


async def window(session: aiohttp.ClientSession, url: str, seconds: float) -> tuple[float, float]:
    """Output tokens per second, and the busy share of the scheduler, in the next ``seconds``."""
    before, began_s = await counters(session, url), time.perf_counter()
    await asyncio.sleep(seconds)
    after, span_s = await counters(session, url), time.perf_counter() - began_s
    return (after[TOKENS] - before[TOKENS]) / span_s, (after[BUSY] - before[BUSY]) / span_s


async def measure(target: Deployment, arguments: argparse.Namespace) -> None:
    """Print each window, then the medians."""
    found: dict[int, list[tuple[float, float]]] = {0: [], arguments.pages: []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [
            asyncio.create_task(client(session, target, random.Random(seed), arguments))
            for seed in range(arguments.clients)
        ]
        await asyncio.sleep(arguments.warm_s)
        for turn in range(arguments.turns):
            for pages in (0, arguments.pages) if turn % 2 else (arguments.pages, 0):
                readers = [
                    await asyncio.create_subprocess_exec(sys.executable, "-c", READER, f"{target.base_url}/api/events")
                    for _ in range(pages)
                ]
                try:
                    await asyncio.sleep(2.0)
                    rate, busy = await window(session, target.base_url, arguments.seconds)
                finally:
                    for reader in readers:
                        reader.terminate()
                        await reader.wait()
                found[pages].append((rate, busy))
                print(f"{pages} pages: {rate:.0f} output tokens/s, scheduler busy {busy:.1%}", flush=True)
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    without, watched = (statistics.median(rate for rate, _ in found[pages]) for pages in (0, arguments.pages))
    print(f"medians: {without:.0f} without, {watched:.0f} with {arguments.pages} pages: {watched / without - 1:+.2%}")


async def run(arguments: argparse.Namespace) -> None:
    with scratch() as folder:
        options = {"model": arguments.model, "max_model_len": arguments.max_model_len}
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
        async with deployed(as_served(settings, folder), Path(folder) / "log") as target:
            await measure(target, arguments)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.bench_watched")
    parser.add_argument("--model", help="a folder, an id, or a shape of the benchmarks (default: the shipped model)")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=100, help="on average")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one window")
    parser.add_argument("--warm-s", type=float, default=15.0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
