"""One key sends what takes long to handle, over and over: what do others notice?

    python -m tests.chaos.bombs [--seconds 10] [--only NAME] [--nice 19] [--vocab-size 50000]

Four victims ask for eight tokens each, one request after the other, once alone and once beside each bomb, which other
processes send so many at a time. The answers of victims have to be right, a bomb is answered or refused, and the exit
code says whether the 99th percentile of the victims' latency is at most 100 ms longer than alone. The last column says
how many processors each kind of actor, Redis and the bombers have kept busy; with ``--nice 19`` the bombers, who live
elsewhere in truth, take only what the others leave.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.chaos.deployment import Deployment, deployed
from tests.chaos.processors import Processors

STEP_MS = 5
VOCAB = 50_000
VICTIMS = 4
MOST_MORE_MS = 100.0
KEYS = '[victim]\nkey = "victims-secret"\n[bomber]\nkey = "bombers-secret"\n'
VICTIM = {"prompt": "a short one", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "x", "max_tokens": 1}


@dataclass(frozen=True)
class Bomb:
    """``at_once`` of what ``body`` makes are under way all the time."""

    name: str
    at_once: int
    body: Callable[[], dict[str, Any]]
    path: str = "/v1/completions"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


BOMBS = (
    Bomb("8 lists of 1,000,000 allowed ids", 8, lambda: SHORT | {"allowed_token_ids": [7] * 1_000_000}),
    Bomb("8 lists of 50,000 allowed ids", 8, lambda: SHORT | {"allowed_token_ids": list(range(VOCAB))}),
    Bomb("24 prompts of 3.8 MB", 24, lambda: SHORT | {"prompt": "word " * 760_000}),
    Bomb("100 prompts of 400 KB", 100, lambda: SHORT | {"prompt": "word " * 80_000}),
    Bomb("8 truncated prompts of 3.8 MB", 8,
         lambda: SHORT | {"prompt": "word " * 760_000, "truncate_prompt_tokens": 9}),
    Bomb("24 chats of 3.8 MB", 24, lambda: {"messages": [{"role": "user", "content": "word " * 760_000}]},
         "/v1/chat/completions"),
    Bomb("8 texts of 400 KB to tokenize", 8, lambda: {"prompt": "word " * 80_000}, "/tokenize"),
    Bomb("2 calls of 1024 prompts", 2, lambda: SHORT | {"prompt": ["x"] * 1024}),
    Bomb("8 of bad words", 8, lambda: SHORT | {"bad_words": ["never " * 160] * 128}),
    Bomb("8 of brackets", 8, lambda: SHORT | {"metadata": {"x": [[]] * 900_000}}),
    Bomb("8 deep ones", 8, lambda: SHORT | {"metadata": {"x": nested(900)}}),
    Bomb("8 of 64 choices with 20 log probabilities", 8,
         lambda: SHORT | {"n": 64, "max_tokens": 8, "logprobs": 20, "ignore_eos": True}),
    Bomb("8 schemas of 100 KB", 8,
         lambda: SHORT | {"structured_outputs": {"json": {"enum": [f"{i}" * 8 for i in range(9000)]}}}),
)  # fmt: skip


def throw(url: str, path: str, body: bytes, until_s: float, told: Any) -> None:
    """In a process of its own: send it again and again, and count the answers."""
    answers: Counter[int] = Counter()
    headers = {"Authorization": "Bearer bombers-secret", "Content-Type": "application/json"}
    while time.time() < until_s:
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=120) as response:
                response.read()
                answers[response.status] += 1
        except urllib.error.HTTPError as error:
            error.read()
            answers[error.code] += 1
            if error.code == 429:
                time.sleep(0.2)
        except OSError:
            answers[0] += 1
    told.put(dict(answers))


def throw_many(url: str, path: str, body: bytes, until_s: float, told: Any, count: int, niceness: int) -> None:
    """Several of these, as threads."""
    from concurrent.futures import ThreadPoolExecutor

    os.nice(niceness)
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(throw, url, path, body, until_s, told)


async def ask(session: aiohttp.ClientSession, url: str, until_s: float, times_ms: list[float], texts: set[str]) -> None:
    while time.time() < until_s:
        began_s = time.perf_counter()
        async with session.post(url + "/v1/completions", json=VICTIM) as response:
            answer = await response.json()
            assert response.status == 200, answer
        times_ms.append((time.perf_counter() - began_s) * 1e3)
        texts.add(answer["choices"][0]["text"])


async def victims(url: str, seconds: float) -> tuple[list[float], set[str]]:
    """Latencies, and the texts of the answers."""
    times_ms: list[float] = []
    texts: set[str] = set()
    headers = {"Authorization": "Bearer victims-secret"}
    async with aiohttp.ClientSession(headers=headers) as session:
        until_s = time.time() + seconds
        await asyncio.gather(*(ask(session, url, until_s, times_ms, texts) for _ in range(VICTIMS)))
    return times_ms, texts


def beside(
    deployment: Deployment, bomb: Bomb, seconds: float, niceness: int
) -> tuple[list[float], set[str], Counter[int], str]:
    """The victims beside a bomb, how often that got which status, and how busy who was."""
    body = json.dumps({"model": "oracle", **bomb.body()}).encode()
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    arguments = (deployment.url, bomb.path, body, time.time() + seconds + 1, told, bomb.at_once, niceness)
    process = context.Process(target=throw_many, args=arguments)
    process.start()
    time.sleep(0.5)
    processors = Processors(deployment, process.pid)
    times_ms, texts = asyncio.run(victims(deployment.url, seconds))
    busy = processors.told()
    answers: Counter[int] = Counter()
    for _ in range(bomb.at_once):
        answers.update(told.get())
    process.join()
    return times_ms, texts, answers, busy


def percentiles(times_ms: list[float]) -> str:
    p50, p99 = np.percentile(times_ms, (50, 99))
    return f"{p50:.0f}, {p99:.0f}"


def measure(deployment: Deployment, seconds: float, only: str, niceness: int) -> list[str]:
    """A line per bomb; what is wrong."""
    problems: list[str] = []
    right = asyncio.run(victims(deployment.url, 3.0))[1]
    print("| bomb | alone p50, p99, ms | beside it p50, p99, ms | answers to the bomb | processors |")
    print("| --- | --- | --- | --- | --- |")
    for bomb in BOMBS:
        if only not in bomb.name:
            continue
        alone, _ = asyncio.run(victims(deployment.url, seconds))
        times_ms, texts, answers, busy = beside(deployment, bomb, seconds, niceness)
        told = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
        print(f"| {bomb.name} | {percentiles(alone)} | {percentiles(times_ms)} | {told} | {busy} |", flush=True)
        more_ms = np.percentile(times_ms, 99) - np.percentile(alone, 99)
        if more_ms > MOST_MORE_MS:
            problems.append(f"{bomb.name}: {more_ms:.0f} ms more")
        if texts != right:
            problems.append(f"{bomb.name}: other answers for the victims")
        if any(status >= 500 or status == 0 for status in answers):
            problems.append(f"{bomb.name}: {told}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", default="", help="bombs with this in their names")
    parser.add_argument("--nice", type=int, default=0, help="of the bombers' processes")
    parser.add_argument(
        "--vocab-size", type=int, default=0, help=f"for the allowed ids: {VOCAB}; the sampler slows down"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagebus-bombs-") as name:
        folder = Path(name)
        (folder / "keys.toml").write_text(KEYS)
        options = ("--api-key-file", str(folder / "keys.toml"), "--cpu-kv-cache-gib", "0.02")
        with deployed(folder, *options, step_ms=STEP_MS, vocab_size=arguments.vocab_size) as deployment:
            problems = measure(deployment, arguments.seconds, arguments.only, arguments.nice)
    print("\n".join(problems) or "nothing wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
