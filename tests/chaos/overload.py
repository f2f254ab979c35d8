"""What a deployment does when it is asked for ten times what it can do.

    python -m tests.chaos.overload [--seconds 30] [--json FILE]

Measures what saturated clients get, and then sends requests at 0.8, 1, 2 and 10 times that rate (of the same lengths
each time, and 0.8 times again), whatever the answers are, with the client of ``pagebus bench serve``. Before the last,
three tenants together send 10 times that rate, with weights and rates that have nothing to do with each other. The
executor is an oracle whose steps take 50 ms, so a core is enough. Goodput are the output tokens each second, once slots
had time to fill, of requests that ended well and had their first token in time. The exit code says whether goodput at
ten times the rate is within 5% of the best, memory within 10% of that before, refusals come within 50 ms and say when
to come again, every tenant gets 90% of its share, and first tokens are as fast as before within 30 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from pagebus.actors.bench.driver.client import Outcome, run_calls
from pagebus.actors.bench.driver.load import Spec, make_calls
from tests.chaos.deployment import Deployment, deployed

SLOTS, QUEUED = 16, 24
"""As many may wait as get a slot in 3.4 s: a queue is to be as long as clients wait, less some for chance."""
STEP_MS = 50
IN_TIME_S = 5.0
"""To the first token: what two full sets of slots before it need, and some more."""
FILLING_S = 5.0
"""Until slots and queue are as full as they get."""
FACTORS = (0.8, 1.0, 2.0, 10.0)
SCALE = 0.2
MOST_LOSS, MOST_GROWTH = 0.05, 0.1
MOST_REFUSAL_MS = 50.0
RECOVERED_S, RECOVERED = 30.0, 1.5
"""Time after overload until first tokens take at most so many times what they took before."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A key, its weight, and its part of the ten times that all together ask for."""

    name: str
    weight: float
    part: float

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.name}-long-secret"}


TENANTS = (Tenant("flood", 1, 0.7), Tenant("other", 1, 0.15), Tenant("heavy", 2, 0.15))
LEAST_OF_SHARE = 0.9
TENANTS_LONGER = 3
"""Times as long as the other rates are measured, so that a few long answers more or less do not matter."""


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


@dataclass(slots=True)
class Measured:
    """All points, what each tenant got of its share (1: all of it), and what was wrong."""

    points: list[Point] = field(default_factory=list)
    tenants: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


async def measure(deployment: Deployment, seconds: float) -> Measured:
    """Everything, one after the other."""
    vocab_size = json.loads((deployment.model / "config.json").read_text())["vocab_size"]
    spec = Spec(base_url=deployment.url, backend="openai", endpoint="/v1/completions", model="oracle", workload="chat",
                scale=SCALE, vocab_size=vocab_size, headers=TENANTS[0].headers)  # fmt: skip
    most = await saturated(deployment, spec, seconds)
    print(f"saturated: {most:.2f} requests each second")
    measured = Measured()
    for factor in FACTORS:
        await add_point(measured, deployment, [replace(spec, rate=most * factor)], factor, seconds)
        await asyncio.to_thread(until_idle, deployment)
    parts = [replace(spec, rate=most * FACTORS[-1] * tenant.part, headers=tenant.headers) for tenant in TENANTS]
    seen = await add_point(measured, deployment, parts, FACTORS[-1], seconds * TENANTS_LONGER)
    tokens = [sum(each.served for each in of_tenant) for of_tenant in seen]
    weights = sum(tenant.weight for tenant in TENANTS)
    for tenant, got in zip(TENANTS, tokens, strict=True):
        of_share = measured.tenants[tenant.name] = got / sum(tokens) * weights / tenant.weight
        print(
            f"{tenant.name} (weight {tenant.weight:g}, {tenant.part:.0%} of the requests): {of_share:.1%} of its share"
        )
        if of_share < LEAST_OF_SHARE:
            measured.problems.append(f"{tenant.name} gets {of_share:.1%} of its share")
    await add_point(measured, deployment, [replace(spec, rate=most * FACTORS[0])], FACTORS[0], RECOVERED_S)
    return measured


async def add_point(
    measured: Measured, deployment: Deployment, specs: list[Spec], factor: float, seconds: float
) -> list[list[Seen]]:
    """Measure one rate, asked for by one tenant or several; what each of them saw."""
    watch = asyncio.create_task(most_memory(deployment))
    began_s = time.time()
    salts = (f"{len(measured.points)} {place}" for place in range(len(specs)))  # no prompt was there before
    specs = [replace(spec, extra_body={"cache_salt": salt}) for spec, salt in zip(specs, salts, strict=True)]
    seen = await asyncio.gather(*(at_rate(spec, began_s, seconds) for spec in specs))
    watch.cancel()
    memory = (await asyncio.gather(watch, return_exceptions=True))[0]
    every = [each for each_tenant in seen for each in each_tenant]
    refused = [each for each in every if each.outcome.error.startswith("status 429")]
    refusals_ms = [each.seconds * 1e3 for each in refused]
    errors = [each.outcome.error for each in every if each.outcome.error and each not in refused]
    ended = [each for each in every if not each.outcome.error]
    ttft = [each.ttft_s * 1e3 for each in ended]
    point = Point(
        factor=factor,
        offered_per_s=sum(spec.rate for spec in specs),
        goodput_tokens_per_s=sum(each.goodput for each in every) / (seconds - FILLING_S),
        ended=len(ended),
        refused=len(refused),
        failed=len(errors),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        refusal_p50=percentile(refusals_ms, 50),
        refusal_p99=percentile(refusals_ms, 99),
        memory=memory if isinstance(memory, float) else 0.0,
    )
    print(row(point), flush=True)
    measured.points.append(point)
    measured.problems += errors
    if not all("try again in" in each.outcome.error for each in refused):
        measured.problems.append("a refusal does not say when to come again")
    return list(seen)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, the ``seconds`` until its client had all, and the ``part`` of its answer in the time that counts."""

    outcome: Outcome
    seconds: float
    part: float

    @property
    def ttft_s(self) -> float:
        return self.outcome.first_s - self.outcome.sent_s

    @property
    def goodput(self) -> float:
        """Tokens that came soon enough."""
        return self.part * self.outcome.output_tokens if self.ttft_s <= IN_TIME_S else 0.0

    @property
    def served(self) -> float:
        """Tokens of prompt and answer, by which keys are compared."""
        return self.part * (self.outcome.prompt_tokens + self.outcome.output_tokens)


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


async def at_rate(spec: Spec, began_s: float, seconds: float) -> list[Seen]:
    """What came of a stream of requests that takes no notice of the answers."""
    spec = replace(spec, requests=max(1, round(spec.rate * seconds)))
    seen: list[Seen] = []

    def note(outcome: Outcome) -> None:
        part = part_between(outcome, began_s + FILLING_S, began_s + seconds)
        seen.append(Seen(outcome, time.time() - outcome.sent_s, part))

    await run_calls(spec, make_calls(spec), began_s, note, 0)
    return seen


def part_between(outcome: Outcome, from_s: float, until_s: float) -> float:
    """Of the answer of a request that ended well."""
    if outcome.error:
        return 0.0
    events_s = outcome.first_s + np.cumsum([0.0, *outcome.gaps_s])
    return float(np.mean((events_s >= from_s) & (events_s < until_s)))


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


def judge(measured: Measured) -> list[str]:
    """All that was wrong."""
    problems, points = list(measured.problems), measured.points
    best = max(point.goodput_tokens_per_s for point in points)
    for point in points:
        if point.factor != max(FACTORS):
            continue
        if point.goodput_tokens_per_s < best * (1 - MOST_LOSS):
            problems.append(f"goodput falls from {best:.1f} to {point.goodput_tokens_per_s:.1f} tokens/s")
        if point.memory > points[0].memory * (1 + MOST_GROWTH):
            problems.append(f"memory grows from {points[0].memory:.1f} to {point.memory:.1f} MiB")
        if point.refusal_p99 > MOST_REFUSAL_MS:
            problems.append(f"1% of refusals take {point.refusal_p99:.0f} ms and more")
    if points[-1].ttft_p50 > points[0].ttft_p50 * RECOVERED:
        problems.append(f"first tokens take {points[-1].ttft_p50:.0f} ms afterwards, not {points[0].ttft_p50:.0f}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="at each rate")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagebus-overload-") as name:
        folder = Path(name)
        keys = (f'[{each.name}]\nkey = "{each.name}-long-secret"\nweight = {each.weight}\n' for each in TENANTS)
        (folder / "keys.toml").write_text("".join(keys))
        limits = ("--max-num-seqs", str(SLOTS), "--max-num-queued-requests", str(QUEUED), "--cpu-kv-cache-gib", "0.02",
                  "--api-key-file", str(folder / "keys.toml"))  # fmt: skip
        with deployed(folder, *limits, step_ms=STEP_MS) as deployment:
            measured = asyncio.run(measure(deployment, arguments.seconds))
            problems = judge(measured)
            if deployment.stop() != 0:
                problems.append("the deployment did not end well")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(measured)) + "\n")
    print("\n".join(problems) or "nothing wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
