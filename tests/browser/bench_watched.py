"""What looking costs: throughput of a deployment with pages connected and without, in turn.

``python -m tests.browser.bench_watched [--model qwen06b] [--clients 64] [--pages 5]``. A page here is what reads
``/api/events`` as fast as it comes; drawing is the reader's own business. Each turn is a window without pages, one with
and one without again, of which the middle one is compared with the mean of its neighbours.

Without a GPU: ``--modelled h200-llama8b`` replaces the executor by one that sleeps for as long as a step takes on that
device (see :mod:`tests.browser.modelled_executor`). All else is as ever: every actor a process, over a real Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from pagebus.actors.bench.driver.deployment import as_served, deployed, scratch
from pagebus.actors.runtime.child import die_with_parent
from pagebus.actors.runtime.health_check import http_status, url_of
from pagebus.actors.runtime.readiness import ingress_addresses
from pagebus.actors.runtime.supervisor import plan_children
from pagebus.actors.settings import Settings
from pagebus.bus.connect import open_bus
from pagebus.bus.private_redis.server import PrivateRedis
from tests.browser.modelled_executor import ModelledExecutor

READER = """
import socket, sys
host, port = sys.argv[1].removeprefix("http://").split(":")
page = socket.create_connection((host, int(port)))
page.sendall(b"GET /api/events HTTP/1.1\\r\\nHost: page\\r\\n\\r\\n")
page.recv(1 << 20)
print("connected", flush=True)
while page.recv(1 << 20):
    pass
"""
TOKENS, CPU = "vllm:generation_tokens_total", "process_cpu_seconds_total"
START_S = 60.0
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Window:
    """Output tokens per second, and the CPU seconds per second of each actor (of metrics up to a second old)."""

    rate: float
    cpu: dict[str, float] = field(default_factory=dict)


async def client(
    session: aiohttp.ClientSession, url: str, vocab_size: int, dice: random.Random, arguments: argparse.Namespace
) -> None:
    """Requests of random tokens, one after another, each a stream."""
    while True:
        ids = [dice.randrange(256, vocab_size) for _ in range(arguments.prompt_tokens)]
        body = {"prompt": ids, "max_tokens": dice.randint(1, 2 * arguments.output_tokens), "ignore_eos": True,
                "stream": True}  # fmt: skip
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for _ in response.content.iter_any():
                pass
            if response.status != 200:
                raise RuntimeError(f"status {response.status}")


async def counters(session: aiohttp.ClientSession, url: str) -> tuple[float, dict[str, float]]:
    """The tokens generated so far, and the CPU seconds of each actor."""
    tokens, cpu = 0.0, defaultdict[str, float](float)
    async with session.get(f"{url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(TOKENS):
                tokens += float(line.rsplit(" ", 1)[1])
            elif line.startswith(CPU):
                cpu[line.split('actor="')[1].split('"')[0]] += float(line.rsplit(" ", 1)[1])
    return tokens, cpu


async def window(session: aiohttp.ClientSession, url: str, pages: int, seconds: float) -> Window:
    """The next ``seconds``, with so many pages that have been there for a moment."""
    command = (sys.executable, "-I", "-S", "-c", READER, url)
    pipe = asyncio.subprocess.PIPE
    readers = [await asyncio.create_subprocess_exec(*command, stdout=pipe) for _ in range(pages)]
    try:
        for reader in readers:
            assert reader.stdout is not None
            await reader.stdout.readline()
        await asyncio.sleep(SETTLE_S)
        (tokens, cpu), began_s = await counters(session, url), time.perf_counter()
        await asyncio.sleep(seconds)
        (more, then), span_s = await counters(session, url), time.perf_counter() - began_s
    finally:
        for reader in readers:
            reader.terminate()
            await reader.wait()
    return Window((more - tokens) / span_s, {name: (then[name] - cpu[name]) / span_s for name in then})


async def measure(url: str, vocab_size: int, arguments: argparse.Namespace) -> None:
    """Print each turn, then the medians."""
    plain: list[Window] = []
    watched: list[Window] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [
            asyncio.create_task(client(session, url, vocab_size, random.Random(seed), arguments))
            for seed in range(arguments.clients)
        ]
        await asyncio.sleep(arguments.warm_s)
        plain.append(await window(session, url, 0, arguments.seconds))
        for turn in range(arguments.turns):
            watched.append(await window(session, url, arguments.pages, arguments.seconds))
            plain.append(await window(session, url, 0, arguments.seconds))
            rates = [f"{each.rate:.0f}" for each in (plain[-2], watched[-1], plain[-1])]
            for each in clients:
                if each.done():  # only with an error
                    each.result()
            print(f"turn {turn + 1}: {' / '.join(rates)} output tokens/s without, with, without", flush=True)
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    changes = [
        with_pages.rate / ((before.rate + after.rate) / 2) - 1
        for before, with_pages, after in zip(plain, watched, plain[1:], strict=False)
    ]
    rates = [statistics.median(each.rate for each in windows) for windows in (plain, watched)]
    print(f"medians: {rates[0]:.0f} without, {rates[1]:.0f} with {arguments.pages} pages")
    print(f"change, median of {len(changes)} turns: {statistics.median(changes):+.2%}, from {min(changes):+.2%} to "
          f"{max(changes):+.2%}")  # fmt: skip
    for name in sorted(plain[0].cpu):
        cores = [statistics.median(each.cpu.get(name, 0.0) for each in windows) for windows in (plain, watched)]
        print(f"{name:16} {cores[0]:6.1%} of a core without, {cores[1]:6.1%} with")


@contextlib.asynccontextmanager
async def modelled(settings: Settings, profile: str, log: Path) -> AsyncIterator[str]:
    """A deployment whose executor is a modelled one; yields its address."""
    redis = PrivateRedis(None, before_exec=die_with_parent())
    url = await redis.start()
    bus = open_bus(url, settings.name)
    await bus.connect()
    plans = plan_children(settings, url, environ=os.environ, gpus=[], cores=1)
    processes = []
    try:
        with log.open("wb") as out:
            for plan in plans:
                command = list(plan.command)
                if plan.kind == "executor":
                    at = command.index("pagebus.actors.commands.cli")
                    command[at : at + 1] = ["tests.browser.modelled_executor", profile]
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, env=dict(plan.environ), stdout=out, stderr=out, preexec_fn=die_with_parent()
                    )
                )
        async with asyncio.timeout(START_S):
            while True:
                if any(process.returncode is not None for process in processes):
                    raise RuntimeError(f"an actor has ended: see {log}")
                addresses = ingress_addresses(settings, await bus.leases())
                if addresses and await http_status(*addresses[0], "/health") == 200:
                    break
                await asyncio.sleep(0.05)
        yield url_of(*addresses[0])
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))
        await bus.close()
        await redis.stop()


async def run(arguments: argparse.Namespace) -> None:
    with scratch() as folder:
        options = {"model": arguments.model, "max_model_len": arguments.max_model_len}
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
        log = Path(folder) / "log"
        if arguments.modelled:
            async with modelled(as_served(settings, folder, device="cpu"), arguments.modelled, log) as url:
                await measure(url, ModelledExecutor.vocab_size, arguments)
        else:
            async with deployed(as_served(settings, folder), log) as target:
                await measure(target.base_url, target.vocab_size, arguments)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.bench_watched")
    parser.add_argument("--model", help="a folder, an id, or a shape of the benchmarks (default: the shipped model)")
    parser.add_argument("--modelled", metavar="PROFILE", help="no GPU: steps take as long as this profile says")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=100, help="on average")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one window")
    parser.add_argument("--warm-s", type=float, default=15.0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
