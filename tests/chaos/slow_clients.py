"""Eight clients that take next to nothing beside 56 that read at once: who notices?

    python -m tests.chaos.slow_clients [--seconds 35] [--rounds 3] [--json FILE]

The same load over one ingress, in turn: long streams of 8 clients, short ones of 56, one after the other. Once all read
at once; then four of the 8 take a byte each second, and four nothing at all. The exit code says whether the median of
the 99th percentiles of the gaps between tokens of the 56 is within 10% of what it is otherwise, each of the 8 was cut
off before its end, nothing of them is left, and the ingress did not grow by what they left unread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from tests.chaos.deployment import Deployment, deployed
from tests.chaos.load import events

NORMAL, SLOW = 56, 8
STEP_MS = 50
LONG = {"prompt": "a long story", "max_tokens": 1000, "logprobs": 20, "stream": True, "ignore_eos": True}
SHORT = {"prompt": "a short one", "max_tokens": 100, "stream": True, "ignore_eos": True}
RECEIVE_BUFFER_BYTES = 4096
MOST_SLOWER, MOST_GROWTH_MIB = 0.1, 8.0


@dataclass(slots=True)
class Run:
    """Gaps between tokens of the 56 clients, what the ingress had at most in MiB, and when nothing was under way any
    more."""

    gaps_ms: list[float] = field(default_factory=list)
    memory: float = 0.0
    ended_s: float = 0.0

    @property
    def p99(self) -> float:
        return float(np.percentile(self.gaps_ms, 99))


async def run(deployment: Deployment, seconds: float, *, slow: bool) -> tuple[Run, list[bytes]]:
    """One load, and what the slow clients had got when they were cut off."""
    result, over, began_s = Run(), asyncio.Event(), time.monotonic()
    sockets: list[socket.socket] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        if slow:
            sockets = [await ask_slowly(deployment.url) for _ in range(SLOW)]
            others = [asyncio.create_task(trickle(each)) for each in sockets[: SLOW // 2]]
        else:
            others = [asyncio.create_task(read(session, deployment.url, LONG, [])) for _ in range(SLOW)]
        watch = asyncio.create_task(watch_memory(deployment, result))
        clients = [
            asyncio.create_task(read_again_and_again(session, deployment.url, over, result)) for _ in range(NORMAL)
        ]
        await asyncio.sleep(seconds)
        over.set()
        await asyncio.gather(*clients)
        watch.cancel()
        if not slow:
            cancel(others)
        while (await asyncio.to_thread(deployment.health))[1]["open_requests"]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        result.ended_s = time.monotonic() - began_s
        cancel(others)  # who takes a byte each second has some hours' worth of them left
        await asyncio.gather(*others, return_exceptions=True)
    return result, [await asyncio.to_thread(rest, each) for each in sockets]


def cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


async def read_again_and_again(session: aiohttp.ClientSession, url: str, over: asyncio.Event, result: Run) -> None:
    while not over.is_set():
        times_s: list[float] = []
        await read(session, url, SHORT, times_s)
        result.gaps_ms += (np.diff(times_s) * 1e3).tolist()


async def read(session: aiohttp.ClientSession, url: str, body: dict[str, object], times_s: list[float]) -> None:
    """One stream, as fast as it comes, to its end."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        told = [data async for _, data in timed(response, times_s)]
    assert told[-1] == "[DONE]"


async def timed(response: aiohttp.ClientResponse, times_s: list[float]):
    async for event in events(response):
        times_s.append(time.monotonic())
        yield event


async def ask_slowly(url: str) -> socket.socket:
    """A connection with a small buffer, on which the long stream was asked for."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    address = urlsplit(url)
    client.connect((address.hostname, address.port))
    body = json.dumps(LONG).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    client.setblocking(False)
    return client


async def trickle(client: socket.socket) -> None:
    """Take a byte each second."""
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(client, 1):  # noqa: ASYNC110
            await asyncio.sleep(1)


def rest(client: socket.socket) -> bytes:
    """What had been sent before the end."""
    told = b""
    client.setblocking(True)
    with client, contextlib.suppress(OSError):
        while data := client.recv(2**16):
            told += data
    return told


async def watch_memory(deployment: Deployment, result: Run) -> None:
    (ingress,) = deployment.of_kind("ingress")
    while True:
        result.memory = max(result.memory, ingress.memory_info().rss / 2**20)
        await asyncio.sleep(0.2)


async def measure(deployment: Deployment, seconds: float, rounds: int) -> tuple[list[Run], list[Run], list[str]]:
    """Runs of both kinds in turn, and what was wrong."""
    normal, beside, told = [], [], []
    await run(deployment, 5.0, slow=False)  # the first requests of a process are slower
    for _ in range(rounds):
        normal.append((await run(deployment, seconds, slow=False))[0])
        result, rests = await run(deployment, seconds, slow=True)
        beside.append(result)
        told += rests
        for name, each in (("all read at once", normal[-1]), ("8 slow clients", beside[-1])):
            gaps = f"{len(each.gaps_ms)} gaps, p50 {np.median(each.gaps_ms):.1f} ms, p99 {each.p99:.1f} ms"
            print(f"{name}: {gaps}; ingress {each.memory:.1f} MiB; idle after {each.ended_s:.1f} s", flush=True)
    problems = [f"left over: {each}" for each in await deployment.until_at_rest()]
    before, after = (float(np.median([each.p99 for each in runs])) for runs in (normal, beside))
    if after > before * (1 + MOST_SLOWER):
        problems.append(f"the 99th percentile of gaps grows from {before:.1f} to {after:.1f} ms")
    if not all(each.startswith(b"HTTP/1.1 200") for each in told):
        problems.append("a slow client was refused")
    if any(b"[DONE]" in each for each in told):
        problems.append("a slow client was served to the end")
    before, after = (max(each.memory for each in runs) for runs in (normal, beside))
    if after > before + MOST_GROWTH_MIB:
        problems.append(f"the ingress grows from {before:.1f} to {after:.1f} MiB")
    return normal, beside, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=35.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pagebus-slow-") as folder,
        deployed(Path(folder), "--cpu-kv-cache-gib", "0.02", step_ms=STEP_MS) as deployment,
    ):
        normal, beside, problems = asyncio.run(measure(deployment, arguments.seconds, arguments.rounds))
        if deployment.stop() != 0:
            problems.append("the deployment did not end well")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in (*normal, *beside)]) + "\n")
    print("\n".join(problems) or "nothing wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
