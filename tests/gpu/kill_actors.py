"""kill -9 of an actor while all requests of a workload are under way: do all end as they should, and what does it cost?

    python -m tests.gpu.kill_actors --model qwen06b [--workload chat1000] [--kill executor scheduler] [serve's options]

Starts a deployment over Redis, sends the workload over HTTP as it is (twice, the first time to warm up), and then once
more for each kind of actor, which is killed when half of the undisturbed time has passed. Each request must give as
many tokens as it asked for, and one end. Prints, for each run, the seconds from the first request to the last end, the
longest silence of all streams together, and how many requests have the very tokens of the undisturbed run. With random
weights and half precision those in another batch may have others; with ``--deterministic`` all must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import uvloop

from pagebus.actors.bench.driver.deployment import Deployment, as_served, deployed, scratch
from pagebus.actors.bench.driver.load import Call, Spec, make_calls
from pagebus.actors.bench.start import first_token
from pagebus.actors.runtime.health_check import http_status
from pagebus.actors.settings.sources import add_arguments, field_types, load_settings
from tests.chaos.load import silences

OURS = ("bus", "name", "host", "port", "api_key", "executors", "actor_name", "data_dir", "log_format", "span_dir")
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Stream:
    """What came of one request: pieces as they came, parsed when all is over, so that reading costs little."""

    expected_tokens: int
    pieces: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: str = ""

    def spans(self, at_s: float) -> bool:
        """Whether its first token came before, and its last one after a moment."""
        return bool(self.times_s) and self.times_s[0] < at_s < self.times_s[-1]

    def parse(self) -> None:
        """Tokens, and what is wrong, if anything."""
        if self.error:
            return
        reasons = []
        events = [event for event in b"".join(self.pieces).split(b"\n\n") if event]
        for event in events[:-1]:
            chunk = orjson.loads(event.split(b"data: ", 1)[1].split(b"\n", 1)[0])
            if "error" in chunk:
                self.error = str(chunk["error"])
                return
            for choice in chunk["choices"]:
                self.tokens += choice.get("token_ids") or []
                reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
        if not events or events[-1] != b"data: [DONE]":
            self.error = "no [DONE] at the end"
        elif reasons != ["length"] or len(self.tokens) != self.expected_tokens:
            self.error = f"{len(self.tokens)} tokens of {self.expected_tokens}, ends {reasons}"


async def send_all(deployment: Deployment, calls: list[Call]) -> list[Stream]:
    """All calls at once, each read to its end."""
    streams = [Stream(call.output_tokens) for call in calls]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one(call: Call, stream: Stream) -> None:
            url = f"{deployment.base_url}/v1/completions"
            headers = {"Content-Type": "application/json"}
            try:
                async with session.post(url, data=call.body, headers=headers) as response:
                    if response.status != 200:
                        stream.error = f"status {response.status}: {(await response.text())[:200]}"
                        return
                    async for piece in response.content.iter_any():
                        stream.pieces.append(piece)
                        stream.times_s.append(time.monotonic())
            except (aiohttp.ClientError, TimeoutError) as error:
                stream.error = f"{type(error).__name__}: {error}"

        await asyncio.gather(*map(one, calls, streams))
    return streams


async def kill(deployment: Deployment, kind: str, after_s: float) -> float:
    """SIGKILL for the actor of a kind that works; returns when."""
    await asyncio.sleep(after_s)
    leases = await deployment.bus.leases(kind)
    os.kill(int(str(leases[0].info["pid"])), signal.SIGKILL)
    return time.monotonic()


def address(deployment: Deployment) -> tuple[str, int]:
    """Where it listens."""
    parts = urlsplit(deployment.base_url)
    return str(parts.hostname), int(parts.port or 0)


async def run(deployment: Deployment, calls: list[Call], kind: str = "", after_s: float = 0.0) -> dict[str, Any]:
    """One run; its figures, and its streams for comparison."""
    while (await http_status(*address(deployment), "/readyz")) != 200:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.05)
    killing = asyncio.create_task(kill(deployment, kind, after_s)) if kind else None
    began_s = time.monotonic()
    streams = await send_all(deployment, calls)
    seconds = time.monotonic() - began_s
    killed_s = await killing if killing else 0.0
    for stream in streams:
        stream.parse()
    times = sorted(at for stream in streams for at in stream.times_s)
    silence_s = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
    waits = silences(streams, killed_s) if killing else []
    return {
        "streams": streams,
        "killed_s": killed_s,
        "seconds": round(seconds, 2),
        "ended well": sum(not stream.error for stream in streams),
        "silence of all, s": round(silence_s, 2),
        "under way": len(waits),
        "median wait for the next token, s": round(statistics.median(waits), 2) if waits else None,
    }


def show(name: str, figures: dict[str, Any], reference: dict[str, Any] | None) -> int:
    """A line for people and programs; returns how many requests have other tokens than in the ``reference``."""
    others: list[Stream] = []
    told = {key: value for key, value in figures.items() if key not in ("streams", "killed_s")}
    if reference is not None:
        pairs = zip(figures["streams"], reference["streams"], strict=True)
        others = [one for one, other in pairs if one.tokens != other.tokens]
        told["same tokens"] = len(figures["streams"]) - len(others)
        told["others, under way at the kill"] = sum(each.spans(figures["killed_s"]) for each in others)
    print(json.dumps({"run": name, **told}), flush=True)
    for stream in [each for each in figures["streams"] if each.error][:5]:
        print(f"  {stream.error}", flush=True)
    return len(others)


async def measure(arguments: argparse.Namespace) -> int:
    """All runs; the exit code is 1 if a request did not end as it should, or has tokens that it must not have."""
    with scratch() as folder:
        settings = as_served(load_settings(arguments), folder, served_model_name="bench")
        async with deployed(settings, folder / "serve.log") as deployment:
            await first_token(deployment)
            spec = Spec(base_url=deployment.base_url, backend="openai", endpoint="/v1/completions", model="bench",
                        workload=arguments.workload, requests=arguments.requests, scale=arguments.scale,
                        vocab_size=deployment.vocab_size, extra_body={"return_token_ids": True})  # fmt: skip
            calls = make_calls(spec)
            warm_up = await run(deployment, calls)
            show("warm-up", warm_up, None)
            calm = await run(deployment, calls)
            differing = show("undisturbed, compared with the warm-up", calm, warm_up)
            failed = calm["ended well"] < len(calls)
            for kind in arguments.kill:
                figures = await run(deployment, calls, kind, calm["seconds"] / 2)
                differing += show(f"{kind} killed", figures, calm)
                failed |= figures["ended well"] < len(calls)
            failed |= settings.deterministic and differing > 0
            keep_log(folder / "serve.log", failed=failed)
            return int(failed)


def keep_log(log: Path, *, failed: bool) -> None:
    """Show how it ended badly; leave all of it where the caller collects files."""
    text = log.read_text(errors="replace")
    if failed:
        print(text[-4000:])
    if folder := os.environ.get("OUT"):
        Path(folder, "serve.log").write_text(text[-200_000:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="chat1000")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--kill", nargs="*", default=["executor", "scheduler"])
    parser.add_argument("--model", default=argparse.SUPPRESS)
    add_arguments(parser, model=False, only=[name for name in field_types() if name not in OURS])
    return uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
