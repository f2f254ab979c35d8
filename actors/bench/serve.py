"""``pagebus bench serve``: load for any server with OpenAI's protocol, and what its clients saw of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop

from pagebus.actors.bench.driver.client import ERROR_CHARACTERS, Outcome, run_calls
from pagebus.actors.bench.driver.deployment import BenchError
from pagebus.actors.bench.driver.graphs import told_by_metrics, until_captured
from pagebus.actors.bench.driver.load import ENDPOINTS, Spec, make_calls, warm_up_calls
from pagebus.actors.bench.measures.figures import Figures, summary
from pagebus.actors.bench.measures.full_load import full_load
from pagebus.actors.runtime.child import die_with_parent, python_path
from pagebus.actors.settings import SettingsError
from pagebus.actors.simulator.workloads import WORKLOADS
from pagebus.actors.telemetry.progress import Progress

SPREAD_S = 3.0
"""What processes get to start and to make their prompts, before the first call is due."""
METRICS = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "time to first token",
    "tpot": "per token after the first",
    "itl": "between events with tokens",
    "e2el": "whole request",
}


def bench_serve(arguments: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 if a request failed."""
    goals = parse_goodput(arguments.goodput)
    spec = make_spec(arguments)
    percentiles = parse_percentiles(arguments.metric_percentiles)
    runs, failed = [], 0
    for repeat in range(arguments.repeats):
        outcomes = uvloop.run(_run(replace(spec, seed=spec.seed + repeat), arguments))
        failed += report_errors(outcomes)
        runs.append(make_figures(outcomes, goals, percentiles))
    figures = summary(runs)
    print(table(spec, figures, percentiles, arguments.repeats))
    if arguments.json:
        row = {"name": f"serve/{spec.workload}", "figures": figures, "runs": runs}
        told = {key: value for key, value in asdict(spec).items() if key not in ("headers", "extra_body")}
        results = {
            "benchmark": "serve",
            "spec": told,
            "repeats": arguments.repeats,
            "wait_for_graphs": arguments.wait_for_graphs,
            "points": [row],
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


def make_spec(arguments: argparse.Namespace) -> Spec:
    """What the command line asks for; arrivals and clients are the workload's unless they are given.

    Raises:
        SettingsError: something that cannot be.
    """
    workload = WORKLOADS.get(arguments.workload)
    if workload is None:
        raise SettingsError(f"--workload: no {arguments.workload!r}; there are {', '.join(WORKLOADS)}")
    given = arguments.request_rate is not None or arguments.max_concurrency is not None
    rate = arguments.request_rate if given else workload.rate
    clients = arguments.max_concurrency if given else workload.clients
    if clients and arguments.processes > clients:
        raise SettingsError(f"--processes {arguments.processes}: more than the {clients} requests at a time")
    as_text = arguments.prompts == "text" or arguments.backend == "openai-chat"
    key = os.environ.get("OPENAI_API_KEY")
    headers = dict(_header(text) for text in arguments.header)
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    return Spec(
        base_url=arguments.base_url,
        backend=arguments.backend,
        endpoint=arguments.endpoint or ENDPOINTS[arguments.backend],
        model=arguments.model or "",
        workload=arguments.workload,
        requests=arguments.num_prompts,
        scale=arguments.scale,
        seed=arguments.seed,
        rate=0.0 if rate is None or rate == float("inf") else rate,
        burstiness=arguments.burstiness,
        concurrency=clients or 0,
        as_text=as_text,
        vocab_size=arguments.vocab_size,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        continuous_usage=arguments.continuous_usage_stats,
        extra_body=_extra_body(arguments.extra_body),
        headers=headers,
        timeout_s=arguments.timeout_s,
        processes=arguments.processes,
        lora_modules=tuple(arguments.lora_modules),
        lora_assignment=arguments.lora_assignment,
    )


def _extra_body(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--extra-body: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SettingsError(f"--extra-body {text}: must be a JSON object")
    return fields


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise SettingsError(f"--header {text!r}: write NAME=VALUE")
    return name, value


def parse_goodput(parts: Iterable[str]) -> dict[str, float]:
    """``ttft:300 itl:50`` as seconds by metric.

    Raises:
        SettingsError: another metric, or no number.
    """
    goals = {}
    for part in parts:
        name, _, value = part.partition(":")
        if name not in METRICS:
            raise SettingsError(f"--goodput {part!r}: choose from {', '.join(METRICS)}")
        try:
            goals[name] = float(value) / 1e3
        except ValueError:
            raise SettingsError(f"--goodput {part!r}: write {name}:MILLISECONDS") from None
    return goals


def parse_percentiles(text: str) -> list[float]:
    """``50,99`` as numbers.

    Raises:
        SettingsError: they are none between 0 and 100.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise SettingsError(f"--metric-percentiles {text!r}: write numbers from 0 to 100, separated by commas")
    return values


# -- running ----------------------------------------------------------------------------------------------------------


async def _run(spec: Spec, arguments: argparse.Namespace) -> list[Outcome]:
    if not spec.model:
        spec = replace(spec, model=await served_model(spec))
    if arguments.num_warmups:
        uncounted: list[Outcome] = []
        await run_calls(spec, warm_up_calls(spec, arguments.num_warmups), time.time(), uncounted.append, 0)
        broken = next((outcome for outcome in uncounted if outcome.error), None)
        if broken is not None:
            raise BenchError(f"{spec.url}: {broken.error}")
    terminal = sys.stderr.isatty() and not arguments.disable_tqdm
    progress = Progress(sys.stderr, terminal=terminal, tell=None if not arguments.disable_tqdm else _say_nothing)
    if arguments.wait_for_graphs:
        await until_captured(told_by_metrics(spec), progress)
    outcomes: list[Outcome] = []
    count = spec.requests or WORKLOADS[spec.workload].requests

    def take(outcome: Outcome) -> None:
        outcomes.append(outcome)
        progress.show(f"requests of {count}", len(outcomes) / count)

    if spec.processes == 1:
        await run_calls(spec, make_calls(spec), time.time(), take, spec.concurrency)
    else:
        begin_s = time.time() + SPREAD_S
        await asyncio.gather(*(_run_part(spec, part, begin_s, take) for part in range(spec.processes)))
    progress.done()
    return outcomes


def _say_nothing(phase: str, share: float | None) -> None:
    pass


async def served_model(spec: Spec) -> str:
    """The first model that the server lists."""
    url = f"{spec.base_url.rstrip('/')}/v1/models"
    async with aiohttp.ClientSession(headers=spec.headers) as session:
        try:
            async with session.get(url) as response:
                if response.status != 200:
                    raise BenchError(f"{url}: status {response.status}: {(await response.text())[:ERROR_CHARACTERS]}")
                return str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, KeyError, IndexError, ValueError) as error:
            raise BenchError(f"{url}: {type(error).__name__}: {error}") from error


async def _run_part(spec: Spec, part: int, begin_s: float, take: Any) -> None:
    """One process's part of the calls."""
    environ = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "pagebus.actors.bench.driver.client", str(part), env=environ, limit=2**26,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, preexec_fn=die_with_parent(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(orjson.dumps({"spec": asdict(spec), "begin_s": begin_s}))
    process.stdin.close()
    async for line in process.stdout:
        take(Outcome(**orjson.loads(line)))
    if await process.wait():
        raise BenchError(f"part {part} of the load generator ended with {process.returncode}")


# -- figures ----------------------------------------------------------------------------------------------------------


def make_figures(outcomes: Sequence[Outcome], goals: dict[str, float], percentiles: Sequence[float]) -> Figures:
    """What the clients saw; times in milliseconds, of the requests that succeeded."""
    good = [outcome for outcome in outcomes if not outcome.error]
    if not good:
        raise BenchError("no request succeeded")
    seconds = max(outcome.last_s for outcome in good) - min(outcome.sent_s for outcome in outcomes)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    values = {name: np.array([each for outcome in good for each in times(outcome)[name]]) for name in METRICS}
    full_rate, full_s = full_load(good)
    met = [all(max(times(outcome)[name], default=0.0) <= limit for name, limit in goals.items()) for outcome in good]
    figures: Figures = {
        "seconds": seconds,
        "requests": float(len(good)),
        "failed": float(len(outcomes) - len(good)),
        "prompt_tokens": float(prompt_tokens),
        "output_tokens": float(output_tokens),
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (output_tokens + prompt_tokens) / seconds,
        "peak_concurrency": float(peak_concurrency(good)),
        "full_load_output_tokens_per_s": full_rate,
        "full_load_seconds": full_s,
    }
    if goals:
        figures["goodput_requests_per_s"] = sum(met) / seconds
        figures["good_share"] = sum(met) / len(outcomes)
    for name, each in values.items():
        if len(each):
            figures[f"{name}_ms_mean"] = float(each.mean()) * 1e3
            for percentile in percentiles:
                figures[f"{name}_ms_p{percentile:g}"] = float(np.percentile(each, percentile)) * 1e3
    return figures


def times(outcome: Outcome) -> dict[str, list[float]]:
    """The values of one request that each metric is made of, seconds."""
    after = outcome.output_tokens - 1
    return {
        "ttft": [outcome.first_s - outcome.sent_s],
        "tpot": [(outcome.last_s - outcome.first_s) / after] if after > 0 else [],
        "itl": outcome.gaps_s,
        "e2el": [outcome.last_s - outcome.sent_s],
    }


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way together."""
    changes = sorted([(each.sent_s, 1) for each in outcomes] + [(each.last_s, -1) for each in outcomes])
    return int(np.cumsum([change for _, change in changes]).max())


def report_errors(outcomes: Sequence[Outcome]) -> int:
    """Say what went wrong, each kind once; returns how many requests failed."""
    kinds: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            kinds[outcome.error] = kinds.get(outcome.error, 0) + 1
    for error, count in kinds.items():
        print(f"{count} requests failed: {error}", file=sys.stderr)
    return sum(kinds.values())


def table(spec: Spec, figures: dict[str, dict[str, Any]], percentiles: Sequence[float], repeats: int) -> str:
    """The figures for people: medians of all repeats."""

    def of(name: str) -> float:
        return float(figures[name]["median"]) if name in figures else float("nan")

    columns = ["mean", *(f"p{percentile:g}" for percentile in percentiles)]
    lines = [
        f"{spec.workload} on {spec.url}: {of('requests'):.0f} requests in {of('seconds'):.2f} s, "
        f"{of('failed'):.0f} failed, at most {of('peak_concurrency'):.0f} together"
        + (f" (medians of {repeats} runs)" if repeats > 1 else ""),
        f"requests/s {of('requests_per_s'):.2f}   output tokens/s {of('output_tokens_per_s'):.1f}   "
        f"all tokens/s {of('total_tokens_per_s'):.1f}",
        f"under full load: output tokens/s {of('full_load_output_tokens_per_s'):.1f}, for "
        f"{of('full_load_seconds'):.2f} s",
        "",
        f"{'ms':28}" + "".join(f"{column:>10}" for column in columns),
    ]
    for name in METRICS:
        cells = "".join(f"{of(f'{name}_ms_{column}'):10.2f}" for column in columns)
        lines.append(f"{TITLES[name]:28}{cells}")
    if "good_share" in figures:
        lines += ["", f"good requests/s {of('goodput_requests_per_s'):.2f} ({of('good_share'):.1%} of all)"]
    return "\n".join(lines)
