"""Processor time that an ingress takes for each token that it streams.

    python -m tests.web.bench_streams [--streams 64] [--tokens 400] [--kinds completions chat] [--turns 3]

The ingress is a process of its own over a real Redis. What is behind it is played here: each step brings every stream
one token, and the next step begins when all clients have theirs. So the figure knows no pace, and a busy machine
changes it little. Of ``--turns`` the least counts; the time without any request is taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import orjson
import psutil

import pagebus.actors.shipped_model
from pagebus.actors.runtime.child import die_with_parent
from pagebus.actors.runtime.health_check import http_status
from pagebus.actors.settings import Settings
from pagebus.bus.connect import open_bus
from pagebus.bus.private_redis.server import PrivateRedis
from tests.web.fake_backend import Delta, FakeBackend, batch, tell_tokens

MODEL = Path(pagebus.actors.shipped_model.__file__).parent
TEXTS = (" water", " is", " a", " clear", " liquid", ",", " and", " so", " on")
MESSAGES = [{"role": "user", "content": "What is water?"}]
KINDS: dict[str, tuple[str, dict[str, object], str]] = {
    "completions": ("/v1/completions", {"prompt": [5, 6, 7]}, ""),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, ""),
    "usage": ("/v1/chat/completions",
              {"messages": MESSAGES, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, ""),
    "resumable": ("/v1/chat/completions", {"messages": MESSAGES}, "Idempotency-Key: {}-{}\r\n"),
    "reported": ("/v1/completions", {"prompt": [5, 6, 7], "logprobs": 0}, ""),
}  # fmt: skip
"""What is asked: path, body, and a header."""
IDLE_S = 2.0
QUIET_S = 0.5


class Reader:
    """A client that counts the events it gets."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port, self._request = port, request
        self.num_events = 0

    async def run(self, goal: asyncio.Event, readers: Sequence[Reader], goals: list[int]) -> None:
        """Until the end; sets ``goal`` when all have so many events as ``goals`` says."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError((head + await reader.read()).decode())
        while True:
            data = await reader.read(1 << 16)
            self.num_events += data.count(b"data: ")
            if all(each.num_events >= goals[0] for each in readers):
                goal.set()
            if not data or b"[DONE]" in data:
                break
        writer.close()


def http(port: int, kind: str, number: int) -> bytes:
    """A request of this kind."""
    path, body, header = KINDS[kind]
    data = orjson.dumps({**body, "stream": True, "max_tokens": 100, "model": "bench"})
    more = header.format(time.time_ns(), number)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def streams(port: int, backend: FakeBackend, kind: str, count: int, tokens: int) -> None:
    """Streams of so many tokens each, all to their end."""
    backend.requests.clear()
    readers = [Reader(port, http(port, kind, number)) for number in range(count)]
    goal, goals = asyncio.Event(), [int("chat" in KINDS[kind][0])]  # a chat begins with a role
    ends = asyncio.gather(*(reader.run(goal, readers, goals) for reader in readers))
    while len(backend.requests) < count and not ends.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    requests = list(backend.requests)
    said = 0
    for step in range(1, tokens + 1):
        text, finish = TEXTS[step % len(TEXTS)], "length" if step == tokens else None
        rows = [Delta(each.request_id, text, step, 0, finish, text_offset=said) for each in requests]
        said += len(text)
        goals[0] += 1
        goal.clear()
        await backend.send(requests[0].ingress, tell_tokens(batch(rows), requests[0].sampling))
        if step < tokens:
            reached = asyncio.create_task(goal.wait())
            await asyncio.wait({reached, ends}, return_when=asyncio.FIRST_COMPLETED)
            if ends.done():
                ends.result()
    await ends


@contextlib.asynccontextmanager
async def ingress(profile: str | None) -> AsyncIterator[tuple[psutil.Process, int, FakeBackend]]:
    """An ingress over a Redis of its own, and what is behind it."""
    redis = PrivateRedis(None, before_exec=die_with_parent())
    url = await redis.start()
    settings = Settings()
    bus = open_bus(url, settings.name)
    await bus.connect()
    backend = FakeBackend(bus, answers=False, max_model_len=4096)
    await backend.start()
    python = [sys.executable, *([] if profile is None else ["-m", "cProfile", "-o", profile])]
    command = [*python, "-m", "pagebus.actors.commands.cli", "actor", "ingress", str(MODEL), f"--bus={url}", "--port=0",
               "--served-model-name=bench", "--log-level=error", "--lease-ttl-s=300"]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, env=dict(os.environ), preexec_fn=die_with_parent())
    try:
        yield psutil.Process(process.pid), await port_of(process, backend), backend
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await backend.stop()
        await redis.stop()


async def port_of(process: asyncio.subprocess.Process, backend: FakeBackend) -> int:
    """The port at which it listens, once it answers."""
    while process.returncode is None:
        for lease in await backend.bus.leases("ingress"):
            port = lease.info.get("port")
            if isinstance(port, int) and await http_status("127.0.0.1", port, "/readyz") == 200:
                return port
        await asyncio.sleep(0.1)
    raise RuntimeError("the ingress has ended")


def used_s(process: psutil.Process) -> float:
    """Processor time of the ingress."""
    times = process.cpu_times()
    return times.user + times.system


async def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds a token, of each kind and turn."""
    found: dict[str, list[float]] = {kind: [] for kind in arguments.kinds}
    async with ingress(arguments.profile) as (process, port, backend):
        for kind in arguments.kinds:
            await streams(port, backend, kind, arguments.streams, 20)
        before_s = used_s(process)
        await asyncio.sleep(IDLE_S)
        idle = (used_s(process) - before_s) / IDLE_S
        for _ in range(arguments.turns):
            for kind in arguments.kinds:
                await asyncio.sleep(QUIET_S)
                before_s, began_s = used_s(process), time.perf_counter()
                await streams(port, backend, kind, arguments.streams, arguments.tokens)
                took_s = time.perf_counter() - began_s
                spent_s = used_s(process) - before_s - idle * took_s
                found[kind].append(spent_s / arguments.streams / arguments.tokens * 1e6)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.web.bench_streams")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--profile", metavar="FILE", help="what cProfile says of the ingress goes there")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    for kind, figures in found.items():
        print(f"{kind:12} {min(figures):6.1f} us of processor time a token (median {statistics.median(figures):.1f})")


if __name__ == "__main__":
    main()
