"""Can a client find out, from how soon its first token comes, what another key's clients have asked?

    python -m tests.chaos.cache_timing [--pairs 2000] [--json FILE]

Two keys with ``private_cache``. Again and again the first sends a prompt of its own; then, in random order, the second
sends the same prompt and one that nobody has sent, and the first repeats its own. The executor is an oracle that reads
64 tokens of a prompt per step, so a prompt found in the cache saves three steps. To the second key, both of its prompts
must look the same: no cached token is reported, and the times to the first token pass a Kolmogorov-Smirnov test. The
first key must see its own cache, or the measurement could show nothing. The exit code says whether all that holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from tests.chaos.deployment import deployed
from tests.chaos.load import events

BLOCK, PROMPT_TOKENS, CHUNK_TOKENS = 16, 256, 64
LANES = 4
"""Pairs that are measured at a time, so that batches mix the keys."""
SIGNIFICANT = 0.05
OWNER, PROBER = "owner-long-secret", "prober-long-secret"
KEYS = "".join(f'[{key[:5]}]\nkey = "{key}"\nprivate_cache = true\n' for key in (OWNER, PROBER))


@dataclass(slots=True)
class Times:
    """Milliseconds to the first token, and the cached tokens that were reported, of one kind of request."""

    ttft_ms: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """The prober's requests for what the owner has asked (``known``) and for what nobody has (``unknown``); the
    owner's first requests and their repeats."""

    known: Times = field(default_factory=Times)
    unknown: Times = field(default_factory=Times)
    first: Times = field(default_factory=Times)
    repeated: Times = field(default_factory=Times)


async def measure(url: str, pairs: int, vocab_size: int) -> Seen:
    """All pairs, some at a time."""
    seen, numbers = Seen(), iter(range(pairs))
    async with aiohttp.ClientSession() as session:

        async def lane() -> None:
            for number in numbers:
                await measure_pair(session, url, random.Random(number), vocab_size, seen)

        await asyncio.gather(*(lane() for _ in range(LANES)))
    return seen


async def measure_pair(
    session: aiohttp.ClientSession, url: str, rng: random.Random, vocab_size: int, seen: Seen
) -> None:
    """Two prompts, four requests."""
    secret, other = ([rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    await ask(session, url, OWNER, secret, seen.first)
    probes = [(PROBER, secret, seen.known), (PROBER, other, seen.unknown), (OWNER, secret, seen.repeated)]
    rng.shuffle(probes)
    for key, prompt, times in probes:
        await ask(session, url, key, prompt, times)


async def ask(session: aiohttp.ClientSession, url: str, key: str, prompt: list[int], times: Times) -> None:
    """One request of two tokens."""
    body = {
        "prompt": prompt,
        "max_tokens": 2,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    sent_s, first_s = time.perf_counter(), 0.0
    async with session.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        response.raise_for_status()
        async for _, data in events(response):
            first_s = first_s or time.perf_counter()
            if data != "[DONE]" and (told := json.loads(data).get("usage")):
                times.cached_tokens.append((told["prompt_tokens_details"] or {}).get("cached_tokens", 0))
    times.ttft_ms.append((first_s - sent_s) * 1e3)


def kolmogorov_smirnov(left: list[float], right: list[float]) -> float:
    """The probability that two samples of one distribution differ so much (the limit for large samples)."""
    places = np.sort(np.concatenate((left, right)))
    shares = [np.searchsorted(np.sort(each), places, side="right") / len(each) for each in (left, right)]
    size = math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    distance = size * float(np.abs(shares[0] - shares[1]).max())
    if distance < 0.2:
        return 1.0  # where the series below converges slowly
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * distance) ** 2) for k in range(1, 101)))


def judge(seen: Seen) -> list[str]:
    """What is wrong."""
    problems = []
    if any(seen.known.cached_tokens) or any(seen.unknown.cached_tokens):
        problems.append("a key was told of cached tokens of another")
    if (p := kolmogorov_smirnov(seen.known.ttft_ms, seen.unknown.ttft_ms)) <= SIGNIFICANT:
        problems.append(f"known and unknown prompts of another key can be told apart (p = {p:.4f})")
    if set(seen.repeated.cached_tokens) != {PROMPT_TOKENS - BLOCK}:
        problems.append(f"a key did not find its own prompts: {sorted(set(seen.repeated.cached_tokens))} cached tokens")
    if (p := kolmogorov_smirnov(seen.first.ttft_ms, seen.repeated.ttft_ms)) > SIGNIFICANT:
        problems.append(f"a cached prompt is not faster (p = {p:.4f}): the measurement shows nothing")
    return problems


def report(seen: Seen) -> str:
    rows = {"the other key, asked before by the owner": seen.known, "the other key, asked by nobody": seen.unknown,
            "the owner, first": seen.first, "the owner, again": seen.repeated}  # fmt: skip
    lines = []
    for name, times in rows.items():
        p50, p99 = np.percentile(times.ttft_ms, [50, 99])
        lines.append(f"{name}: {len(times.ttft_ms)} requests, first token p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
                     f"cached tokens {np.mean(times.cached_tokens):.1f}")  # fmt: skip
    across = kolmogorov_smirnov(seen.known.ttft_ms, seen.unknown.ttft_ms)
    within = kolmogorov_smirnov(seen.first.ttft_ms, seen.repeated.ttft_ms)
    return "\n".join([*lines, f"Kolmogorov-Smirnov: across keys p = {across:.3f}; of one key p = {within:.2g}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagebus-timing-") as name:
        folder = Path(name)
        (folder / "keys.toml").write_text(KEYS)
        options = ("--api-key-file", str(folder / "keys.toml"), "--max-num-batched-tokens", str(CHUNK_TOKENS))
        with deployed(folder, *options, step_ms=5) as deployment:
            vocab_size = json.loads((deployment.model / "config.json").read_text())["vocab_size"]
            seen = asyncio.run(measure(f"{deployment.url}/v1/completions", arguments.pairs, vocab_size))
            problems = judge(seen)
            if deployment.stop() != 0:
                problems.append("the deployment did not end well")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(seen)) + "\n")
    print(report(seen))
    print("\n".join(problems) or "nothing wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
