"""What a deployment does when it is asked for ten times what it can do.

    python -m tests.chaos.overload [--seconds 30] [--json FILE]

Measures what saturated clients get, and then sends requests at 0.8, 1, 2 and 10 times that rate (and 0.8 times again),
whatever the answers are, with the client of ``pagebus bench serve``. The executor is an oracle whose steps take 50 ms,
so a core is enough. Goodput are the output tokens of requests that ended well and had their first token in time. The
exit code says whether goodput at ten times the rate is within 10% of the best, and memory within 10% of that before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from actors.bench.client import Outcome, run_calls
from actors.bench.load import Spec, make_calls
from tests.chaos.deployment import Deployment, deployed

SLOTS, QUEUED = 16, 32
STEP_MS = 50
IN_TIME_S = 5.0
"""To the first token: what two full sets of slots before it need, and some more."""
FACTORS = (0.8, 1.0, 2.0, 10.0, 0.8)
SCALE = 0.2
MOST_LOSS = 0.1


@dataclass(frozen=True, slots=True)
class Point:
    """One rate. Latencies in ms, memory in MiB (ingress, scheduler and Redis, the most of them together)."""

    factor: float
    offered_per_s: float
    goodput_tokens_per_s: float
    ended: int
    refused: int
    failed: int
    ttft_p50: float
    ttft_p99: float
    refusal_p50: float
    refusal_p99: float
    memory: float


async def measure(deployment: Deployment, seconds: float) -> tuple[list[Point], list[str]]:
    """All points, and what else went wrong."""
    vocab_size = json.loads((deployment.model / "config.json").read_text())["vocab_size"]
    spec = Spec(base_url=deployment.url, backend="openai", endpoint="/v1/completions", model="oracle", workload="chat",
                scale=SCALE, vocab_size=vocab_size)  # fmt: skip
    most = await saturated(deployment, spec, seconds)
    print(f"saturated: {most:.2f} requests each second")
    points, problems = [], []
    for place, factor in enumerate(FACTORS):
        rate = most * factor
        point, errors = await at_rate(deployment, replace(spec, rate=rate, seed=place + 1), factor, seconds)
        points.append(point)
        problems += errors
        print(row(point), flush=True)
    return points, problems


async def saturated(deployment: Deployment, spec: Spec, seconds: float) -> float:
    """Requests each second that as many clients get as may be under way."""
    calls = make_calls(replace(spec, requests=2000))
    ended = 0
    counts_from_s = time.time() + seconds / 3  # once the first ones have ended, others begin at any time

    def count(outcome: Outcome) -> None:
        nonlocal ended
        ended += not outcome.error and time.time() >= counts_from_s

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await run_calls(spec, calls, time.time(), count, QUEUED)
    await asyncio.to_thread(until_idle, deployment)
    return ended / (seconds * 2 / 3)


async def at_rate(deployment: Deployment, spec: Spec, factor: float, seconds: float) -> tuple[Point, list[str]]:
    """What came of a constant stream of requests; nothing is under way any more afterwards."""
    spec = replace(spec, requests=max(1, round(spec.rate * seconds)))
    outcomes: list[tuple[Outcome, float]] = []
    watch = asyncio.create_task(most_memory(deployment))
    began_s = time.time()
    await run_calls(spec, make_calls(spec), began_s, lambda outcome: outcomes.append((outcome, time.time())), 0)
    watch.cancel()
    ended = [outcome for outcome, _ in outcomes if not outcome.error]
    refused = [(at_s - outcome.sent_s) * 1e3 for outcome, at_s in outcomes if outcome.error.startswith("status 429")]
    errors = [outcome.error for outcome, _ in outcomes if outcome.error and not outcome.error.startswith("status 429")]
    ttft = [(outcome.first_s - outcome.sent_s) * 1e3 for outcome in ended]
    in_time = [outcome for outcome in ended if outcome.first_s - outcome.sent_s <= IN_TIME_S]
    until_s = max((outcome.last_s for outcome in ended), default=began_s)
    memory = (await asyncio.gather(watch, return_exceptions=True))[0]
    point = Point(
        factor=factor,
        offered_per_s=spec.rate,
        goodput_tokens_per_s=sum(outcome.output_tokens for outcome in in_time) / max(until_s - began_s, seconds),
        ended=len(ended),
        refused=len(refused),
        failed=len(errors),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        refusal_p50=percentile(refused, 50),
        refusal_p99=percentile(refused, 99),
        memory=memory if isinstance(memory, float) else 0.0,
    )
    await asyncio.to_thread(until_idle, deployment)
    return point, errors


async def most_memory(deployment: Deployment) -> float:
    """Looks twice a second until it is cancelled."""
    processes = [*deployment.of_kind("ingress"), *deployment.of_kind("scheduler")]
    most = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0.5)
            redis = await asyncio.to_thread(deployment.redis.info, "memory")
            now = sum(process.memory_info().rss for process in processes) + redis["used_memory"]
            most = max(most, now / 2**20)
    return most


def until_idle(deployment: Deployment) -> None:
    """Wait until no request is under way."""
    while deployment.health()[1]["open_requests"]:
        time.sleep(0.1)


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def row(point: Point) -> str:
    told = (
        f"x {point.factor:<4} {point.offered_per_s:6.1f}/s offered",
        f"goodput {point.goodput_tokens_per_s:6.1f} tokens/s",
        f"{point.ended} ended, {point.refused} refused, {point.failed} failed",
        f"first token p50 {point.ttft_p50:.0f} ms, p99 {point.ttft_p99:.0f} ms",
        f"refusal p50 {point.refusal_p50:.1f} ms, p99 {point.refusal_p99:.1f} ms",
        f"{point.memory:.1f} MiB",
    )
    return "; ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="at each rate")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    limits = ("--max-num-seqs", str(SLOTS), "--max-num-queued-requests", str(QUEUED), "--cpu-kv-cache-gib", "0.02")
    with (
        tempfile.TemporaryDirectory(prefix="pagebus-overload-") as folder,
        deployed(Path(folder), *limits, step_ms=STEP_MS) as deployment,
    ):
        points, problems = asyncio.run(measure(deployment, arguments.seconds))
        if deployment.stop() != 0:
            problems.append("the deployment did not end well")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(point) for point in points]) + "\n")
    best = max(point.goodput_tokens_per_s for point in points)
    overload = next(point for point in points if point.factor == max(FACTORS))
    if overload.goodput_tokens_per_s < best * (1 - MOST_LOSS):
        problems.append(f"goodput falls from {best:.1f} to {overload.goodput_tokens_per_s:.1f} tokens/s")
    if overload.memory > points[0].memory * (1 + MOST_LOSS):
        problems.append(f"memory grows from {points[0].memory:.1f} to {overload.memory:.1f} MiB")
    print("\n".join(problems) or "nothing wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
