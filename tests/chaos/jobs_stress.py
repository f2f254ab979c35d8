"""A hundred thousand jobs beside 16 streams, and every part of the deployment killed in turn.

    python -m tests.chaos.jobs_stress [--jobs 100000] [--seconds 30] [--rounds 2] [--json FILE]

Streams are measured alone, then beside the jobs, with the target that an operator would set who lets them be a fifth
slower. Then each actor and Redis are killed, first beside the streams and, once those have ended, some rounds while the
jobs have everything. Each job must be answered once, with the tokens that a client gets; no actor may hold much more
memory than before the jobs came. The exit code says whether all that holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.chaos.deployment import KINDS, Deployment, deployed
from tests.chaos.load import Answer, Load, make_jobs
from tests.chaos.queued import RESULTS, Queued

STREAMS = 16
STEP_MS = 25
WARM_UP_S = 5.0
KILL_EVERY_S = 10.0
MOST_GROWTH = 1.2
"""Of the 99th percentile of the time between two tokens of a stream."""
MOST_MIB = 32
"""That an actor may hold more than before the jobs came."""
LEAST_RATE = 25.0
"""Jobs each second below which it is given up."""
LOOK_S = 0.2
TELL_S = 15.0
PATIENCE_S = 300.0


@dataclass(slots=True)
class Stress:
    """What happens, and what has been seen of it."""

    deployment: Deployment
    load: Load
    queued: Queued
    figures: dict[str, Any] = field(default_factory=dict)
    memory_before: dict[str, float] = field(default_factory=dict)
    memory_most: dict[str, float] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, **figures: Any) -> None:
        """Print, and keep for the end."""
        self.figures |= figures
        for name, value in figures.items():
            print(f"{time.monotonic() - self.began_s:6.0f} s  {name}: {value}", flush=True)

    async def run(self, seconds: float, rounds: int) -> None:
        """All of it."""
        over = asyncio.Event()
        clients = asyncio.create_task(self.load.run(over, keyed=1, patience_s=PATIENCE_S))
        try:
            async with self.watched():
                await self.beside_streams(seconds)
                await self.kill_each()
                over.set()
                await clients
                with self.rated("with_kills"):
                    for _ in range(rounds):
                        await self.kill_each()
                with self.rated("undisturbed"):
                    await self.until_answered()
        finally:
            over.set()
            await clients
        answers = self.queued.answers
        self.tell(
            answered=len(answers),
            answered_twice=sum(answers.values()) - len(answers),
            wrong=len(self.queued.problems),
            answers_of_streams=self.load.answers,
            memory_before=self.memory_before,
            memory_most=self.memory_most,
        )

    async def beside_streams(self, seconds: float) -> None:
        """The time between tokens without jobs, while they are pushed, and beside them."""
        await asyncio.sleep(WARM_UP_S)
        self.tell(alone=await gaps_ms(self.load, seconds))
        self.memory_before = self.memory_mib()
        pushing_s = time.monotonic()
        took_s = await asyncio.to_thread(self.queued.push)
        self.tell(pushed=f"{self.queued.count} jobs in {took_s:.1f} s",
                  while_pushing=percentiles(self.load.streams, pushing_s, time.monotonic()))  # fmt: skip
        with self.rated("beside_streams"):
            self.tell(beside=await gaps_ms(self.load, seconds))

    async def kill_each(self) -> None:
        """SIGKILL, one after another."""
        for kind in KINDS:
            self.deployment.kill(kind)
            await self.recovered(kind)
        self.deployment.kill_redis()
        await asyncio.to_thread(self.deployment.start_redis)
        await self.recovered("redis")

    async def recovered(self, killed: str) -> None:
        answered = len(self.queued.answers)
        await asyncio.sleep(KILL_EVERY_S)
        await asyncio.to_thread(self.deployment.until_healthy)
        print(f"        killed {killed}: {len(self.queued.answers) - answered} jobs answered meanwhile", flush=True)

    async def until_answered(self) -> None:
        """Every job has its answer, or too few come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S + self.queued.count / LEAST_RATE):
                await self.all_answered.wait()

    @contextlib.contextmanager
    def rated(self, phase: str) -> Iterator[None]:
        """Tells how many jobs were answered each second inside."""
        before, began_s = len(self.queued.answers), time.monotonic()
        yield
        rate = (len(self.queued.answers) - before) / (time.monotonic() - began_s)
        self.tell(**{f"jobs_per_s_{phase}": round(rate, 1)})

    # -- what is seen -------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Results are collected, memory is looked at and progress is told meanwhile."""
        tasks = [asyncio.create_task(each) for each in (self._collect(), self._look(), self._progress())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.queued.take)

    async def _collect(self) -> None:
        while True:
            with contextlib.suppress(redis.RedisError, OSError):  # it may be killed just now
                await asyncio.to_thread(self.queued.take)
            if len(self.queued.answers) >= self.queued.count:
                self.all_answered.set()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        while True:
            for name, size in self.memory_mib().items():
                self.memory_most[name] = max(size, self.memory_most.get(name, 0))
            await asyncio.sleep(1)

    async def _progress(self) -> None:
        told = 0
        while True:
            await asyncio.sleep(TELL_S)
            now = len(self.queued.answers)
            rate = (now - told) / TELL_S
            print(f"{time.monotonic() - self.began_s:6.0f} s  {now} answered, {rate:.0f}/s", flush=True)
            told = now

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of each kind of actor, and of what Redis holds."""
        found = {}
        for name, process in self.deployment.actors().items():
            with contextlib.suppress(psutil.Error):
                found[name.partition("-")[0]] = round(process.memory_info().rss / 2**20)
        with contextlib.suppress(redis.RedisError, OSError):
            found["redis"] = round(self.deployment.redis.info("memory")["used_memory"] / 2**20)
        return found

    def problems(self) -> list[str]:
        """What does not hold."""
        figures, found = self.figures, [*self.load.problems, *self.queued.problems[:5]]
        missing = self.queued.count - figures["answered"]
        if missing or figures["answered_twice"] or figures["wrong"]:
            found.append(f"{missing} jobs not answered, {figures['answered_twice']} twice, {figures['wrong']} wrong")
        if figures["beside"]["p99"] >= MOST_GROWTH * figures["alone"]["p99"]:
            found.append(f"99th percentile: {figures['alone']['p99']} -> {figures['beside']['p99']} ms")
        if not figures["jobs_per_s_beside_streams"]:
            found.append("no job was answered beside the streams while they were measured: was the machine calm?")
        for name, before in self.memory_before.items():
            if name != "redis" and self.memory_most[name] > before + MOST_MIB:  # there they wait
                found.append(f"{name} held {self.memory_most[name]} MiB, before {before}")
        return found


async def gaps_ms(load: Load, seconds: float) -> dict[str, float]:
    """Times between tokens of all streams, from now on for so long."""
    began_s = time.monotonic()
    await asyncio.sleep(seconds)
    return percentiles(load.streams, began_s, time.monotonic())


def percentiles(streams: Sequence[Answer], since_s: float, until_s: float) -> dict[str, float]:
    """Of the times between two events of a stream."""
    gaps = [
        1000 * (after_s - before_s)
        for stream in streams
        for before_s, after_s in zip(stream.times_s, stream.times_s[1:], strict=False)
        if since_s <= before_s and after_s <= until_s
    ]
    if len(gaps) < 2:
        return {"tokens": len(gaps)}
    cuts = statistics.quantiles(gaps, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "tokens": len(gaps)}


async def calibrated(folder: Path, seconds: float, step_ms: int) -> tuple[Load, float]:
    """Clients that know their answers, and the target (ms) of who lets streams be a fifth slower for the jobs."""
    with deployed(folder, step_ms=step_ms) as deployment:
        load, over = Load(deployment.url, make_jobs(STREAMS, seed=2, most_tokens=24)), asyncio.Event()
        await load.learn()
        clients = asyncio.create_task(load.run(over, keyed=1, patience_s=PATIENCE_S))
        await asyncio.sleep(WARM_UP_S)
        usual_ms = (await gaps_ms(load, seconds / 2))["p50"]
        over.set()
        await clients
    return load, round(MOST_GROWTH * usual_ms, 1)


async def run(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    step_ms = arguments.step_ms
    for name in ("calibration", "stress"):
        (folder / name).mkdir()
    print("measuring the streams for themselves", flush=True)
    load, target_ms = await calibrated(folder / "calibration", arguments.seconds, step_ms)
    with deployed(folder / "stress", "--itl-target-ms", f"{target_ms}", step_ms=step_ms) as deployment:
        load.url = deployment.url
        stress = Stress(deployment, load, Queued(deployment, load, arguments.jobs))
        stress.tell(itl_target_ms=target_ms)
        await stress.run(arguments.seconds, arguments.rounds)
        problems = stress.problems()
        deployment.redis.delete(RESULTS)
        problems += await deployment.until_at_rest()
        if deployment.stop() != 0:
            problems.append("the deployment did not end well")
    stress.tell(seconds=round(time.monotonic() - stress.began_s))
    return stress.figures, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long streams are measured, with and without")
    parser.add_argument("--rounds", type=int, default=2, help="of kills when the streams have ended")
    parser.add_argument("--step-ms", type=int, default=STEP_MS, help="what a step of the executor takes at least")
    parser.add_argument("--json", type=Path, help="also write all figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagebus-jobs-") as folder:
        figures, problems = asyncio.run(run(arguments, Path(folder)))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in figures.items()))
    print("\n".join(problems) or "every job was answered once, streams went on, nothing has grown or is left over")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures | {"jobs": arguments.jobs, "problems": problems}, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
