"""``pagebus bench start``: how long each phase of a start takes, from the command to the first token over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from pagebus.actors.bench.driver.client import Outcome, send
from pagebus.actors.bench.driver.deployment import BenchError, Deployment, as_served, deployed, scratch
from pagebus.actors.bench.driver.load import Call
from pagebus.actors.bench.measures.costs import Costs
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import to_args
from pagebus.actors.telemetry.progress import Progress

PHASE_DONE, READY = "phase done", "ready"
"""Events in the logs of actors: one says how many ``seconds`` a ``phase`` took, the other that the start is over."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that began and ended, seconds after the command."""

    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """One start: its phases, the seconds to the first token, and the bytes of all weights."""

    phases: list[Phase]
    total_s: float
    weight_bytes: int


def bench_start(arguments: argparse.Namespace, settings: Settings) -> int:
    """Start the deployment several times and show the medians of all phases."""
    runs = []
    progress = Progress(sys.stderr, terminal=sys.stderr.isatty())
    for repeat in range(arguments.repeats):
        progress.show(f"start {repeat + 1} of {arguments.repeats}")
        runs.append(asyncio.run(_start_once(settings)))
    progress.done()
    rows = medians([run.phases for run in runs])
    told = figures(rows, runs)
    print(table(rows, told, runs))
    if arguments.json:
        times = [{phase.name: [phase.began_s, phase.ended_s] for phase in run.phases} for run in runs]
        results = {
            "benchmark": "start",
            "model": settings.model or "shipped",
            "settings": to_args(settings.replace(model="")),
            "repeats": arguments.repeats,
            "points": [{"name": "start", "figures": told, "runs": times}],
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


async def _start_once(settings: Settings) -> Start:
    with scratch() as folder:
        served = as_served(settings, folder)
        async with deployed(served, folder / "serve.log") as deployment:
            births = await actor_births(deployment)
            answered = await first_token(deployment)
            phases = make_phases(deployment, births, answered, read_log(deployment.log))
            config = ModelConfig.of(served)
            return Start(phases, answered.first_s - deployment.started_s, Costs.of(config, deployment.info).all_bytes)


async def first_token(deployment: Deployment) -> Outcome:
    """One completion of one token.

    Raises:
        BenchError: the deployment does not answer as it should.
    """
    body = {"model": "", "prompt": [1, 2, 3], "max_tokens": 1, "stream": True, "ignore_eos": True, "temperature": 0}
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{deployment.base_url}/v1/models") as response:
            body["model"] = (await response.json())["data"][0]["id"]
        call = Call(0, json.dumps({**body, "stream_options": options}).encode(), 0.0, 1)
        answered = await send(session, f"{deployment.base_url}/v1/completions", call)
    if answered.error:
        raise BenchError(f"the first request failed: {answered.error}")
    return answered


async def actor_births(deployment: Deployment) -> dict[str, float]:
    """When the process of each actor began, seconds of the wall clock."""
    births = {}
    for lease in await deployment.bus.leases():
        births[str(lease.info["actor"])] = born_s(int(str(lease.info["pid"])))
    return births


def born_s(pid: int) -> float:
    """When a process of this machine began, seconds of the wall clock."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def read_log(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a log that are JSON objects with a time, with the time as seconds under ``at_s``."""
    lines: list[Mapping[str, Any]] = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "timestamp" in line:
            lines.append({**line, "at_s": datetime.fromisoformat(str(line["timestamp"])).timestamp()})
    return lines


def make_phases(
    deployment: Deployment, births: Mapping[str, float], answered: Outcome, log: Sequence[Mapping[str, Any]]
) -> list[Phase]:
    """All phases, in the order of their beginnings; the last one ends with the first token."""
    start_s = deployment.started_s
    phases = [
        Phase("redis-server", 0.0, deployment.redis_s - start_s),
        Phase("serve: until its actors are started", deployment.redis_s - start_s, min(births.values()) - start_s),
        Phase("all ready, /health is 200", 0.0, deployment.ready_s - start_s),
        Phase("first token over HTTP", answered.sent_s - start_s, answered.first_s - start_s),
    ]
    for line in log:
        actor, at_s = str(line.get("actor")), float(line["at_s"]) - start_s
        kind = actor.partition("-")[0]
        if actor not in births:
            continue
        if line["event"] == PHASE_DONE:
            phases.append(Phase(f"{kind}: {line['phase']}", at_s - float(line["seconds"]), at_s))
        elif line["event"] == READY:
            phases.append(Phase(f"{kind}: from process to ready", births[actor] - start_s, at_s))
    return sorted(phases, key=lambda phase: (phase.began_s, phase.ended_s))


def medians(runs: Sequence[Sequence[Phase]]) -> list[Phase]:
    """Of every phase that all runs have."""
    by_name = [{phase.name: phase for phase in run} for run in runs]
    return [
        Phase(
            phase.name,
            statistics.median(run[phase.name].began_s for run in by_name),
            statistics.median(run[phase.name].ended_s for run in by_name),
        )
        for phase in runs[0]
        if all(phase.name in run for run in by_name)
    ]


def figures(rows: Sequence[Phase], runs: Sequence[Start]) -> dict[str, dict[str, float]]:
    """Seconds from the command to the first token with their spread, of each phase, and the rate of the weights."""
    totals = [run.total_s for run in runs]
    found = {"seconds": {"median": statistics.median(totals), "low": min(totals), "high": max(totals)}}
    for row in rows:
        took_s = row.ended_s - row.began_s
        found[row.name] = {"median": took_s}
        if row.name.endswith(": weights") and took_s > 0:
            found["weights_gb_per_s"] = {"median": runs[0].weight_bytes / took_s / 1e9}
    return found


def table(rows: Sequence[Phase], told: Mapping[str, Mapping[str, float]], runs: Sequence[Start]) -> str:
    """Medians by phase, and the whole time of each run."""
    width = max(len(row.name) for row in rows) + 2
    lines = [f"{'phase':{width}}{'from s':>9}{'to s':>9}{'took s':>9}"]
    for row in rows:
        lines.append(f"{row.name:{width}}{row.began_s:9.2f}{row.ended_s:9.2f}{row.ended_s - row.began_s:9.2f}")
    if "weights_gb_per_s" in told:
        lines.append(f"weights {runs[0].weight_bytes / 1e9:.2f} GB at {told['weights_gb_per_s']['median']:.2f} GB/s")
    each = ", ".join(f"{run.total_s:.2f}" for run in runs)
    return "\n".join([*lines, f"from the command to the first token, s: {told['seconds']['median']:.2f} of {each}"])
