"""Where the time of an engine's steps goes, by kind of step: device, gaps between steps, host, kernels.

    python -m tests.gpu.bench.profile_steps qwen06b [--workload chat1000] [--trace FILE] [--json FILE] [--enforce-eager]

Drives the engine alone (no bus, no scheduler process) through a workload of :mod:`pagebus.actors.simulator.workloads`,
all requests at once, with plans made beforehand as the scheduler makes them, two in flight. Prints, for steps that only
decode, mixed ones and ones of prompts alone: how many, their tokens, the time on the device by CUDA events, the time
between two results, the host's time by part; and for a stretch of steps in the middle the kernels by device time, the
share of the time in which none ran, and on request a chrome trace.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagebus.actors.simulator.recording.trace import Trace
from pagebus.actors.simulator.workloads import WORKLOADS, make_workload
from pagebus.bus.messages import StepPlan, StepResult
from tests.gpu.bench.decode_step import model_folder
from tests.helpers.engine_driver import Driver, Grown

DEPTH = 2
PROFILED_STEPS = 40
KINDS = ("decode", "mixed", "prompts")


def kind_of(plan: StepPlan) -> str:
    if plan.num_decodes == len(plan.slots):
        return "decode"
    return "mixed" if plan.num_decodes else "prompts"


def make_plans(driver: Driver, trace: Trace, limit: int | None = None) -> list[StepPlan]:
    """Every plan of the trace; sequences end by length only, and give their slots up ``DEPTH`` plans later."""
    scheduler, rng = driver.scheduler(), np.random.default_rng(0)
    for prompt, output in zip(trace.prompt_tokens[:limit], trace.output_tokens[:limit], strict=True):
        scheduler.add(rng.integers(0, driver.info.vocab_size, int(prompt)).tolist(), int(output))
    plans: list[StepPlan] = []
    ending: list[list[Grown]] = [[] for _ in range(DEPTH)]
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
        ended = {id(each) for group in ending for each in group}
        ending.append(
            [each for each in scheduler.running if each.num_tokens >= each.max_total and id(each) not in ended]
        )
        for sequence in ending.pop(0):
            scheduler.release(sequence)
    return plans


class HostTimes:
    """Seconds that the device thread spent in parts of a step, per step."""

    def __init__(self, driver: Driver) -> None:
        self.steps: list[dict[str, float]] = []
        loaded = driver.engine._loaded
        runner: Any = loaded.runner
        launch = "_launch" if runner.kv_cache.is_cuda else "_step_on_cpu"
        self._wrap(driver.engine, launch, "whole", begins=True)
        self._wrap(runner.uploader, "send", "upload")
        self._wrap(runner.state, "apply", "scatter")
        self._wrap(runner, "forward", "forward")
        self._wrap(runner.model, "logits", "logits")
        self._wrap(runner, "sample_plainly", "sample")
        if runner.graphs is not None:
            self._wrap(runner.graphs, "run", "replay")
        apply = driver.engine._apply
        driver.engine._apply = self._timed(apply, "apply")  # type: ignore[method-assign]

    def _wrap(self, owner: Any, name: str, part: str, *, begins: bool = False) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), part, begins=begins))

    def _timed(self, function: Callable[..., Any], part: str, *, begins: bool = False) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if begins:
                self.steps.append(defaultdict(float))
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.steps[-1][part] += time.perf_counter() - began

        return timed


@contextmanager
def profiled() -> Iterator[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield profiler


def run_plans(driver: Driver, plans: list[StepPlan]) -> list[StepResult]:
    results: list[StepResult] = []
    for number, plan in enumerate(plans):
        if number >= DEPTH:
            results.append(driver.result())
        driver.engine.submit(plan, driver.epoch)
    while len(results) < len(plans):
        results.append(driver.result())
    return results


def device_times(driver: Driver) -> list[float]:
    """Collects the seconds of each step on the device, as the completion thread reads them from the events."""
    times: list[float] = []
    finish = driver.engine._completion.finish

    def noting(queued: Any, work: Any, tokens: Any, launched_s: float, busy_s: float, copied_step: int) -> None:
        times.append(busy_s)
        finish(queued, work, tokens, launched_s, busy_s, copied_step)

    driver.engine._completion.finish = noting  # type: ignore[method-assign]
    return times


def summary(
    plans: list[StepPlan], results: list[StepResult], busy: list[float], host: HostTimes
) -> list[dict[str, Any]]:
    gaps = [0.0] + [b.done_s - a.done_s for a, b in itertools.pairwise(results)]
    rows = []
    for kind in KINDS:
        chosen = [i for i, plan in enumerate(plans) if kind_of(plan) == kind]
        if not chosen:
            continue
        parts: dict[str, list[float]] = defaultdict(list)
        for i in chosen:
            for part, seconds in host.steps[i].items():
                parts[part].append(seconds * 1e3)
        tokens = [int(plans[i].num_scheduled.sum()) for i in chosen]
        rows.append({
            "kind": kind, "steps": len(chosen), "tokens_p50": statistics.median(tokens),
            "tokens_p90": sorted(tokens)[int(len(tokens) * 0.9)],
            "rows_mean": statistics.mean(len(plans[i].slots) for i in chosen),
            "prompt_rows_mean": statistics.mean(len(plans[i].slots) - plans[i].num_decodes for i in chosen),
            "between_results_ms_p50": statistics.median(gaps[i] * 1e3 for i in chosen),
            "device_ms_p50": statistics.median(busy[i] * 1e3 for i in chosen),
            "device_s": sum(busy[i] for i in chosen), "between_results_s": sum(gaps[i] for i in chosen),
            "host_ms_p50": {part: round(statistics.median(values), 3) for part, values in sorted(parts.items())},
        })  # fmt: skip
    return rows


def by_tokens(plans: list[StepPlan], busy: list[float]) -> list[dict[str, Any]]:
    """Mixed steps by how many tokens they compute."""
    groups: dict[int, list[float]] = defaultdict(list)
    for plan, seconds in zip(plans, busy, strict=True):
        if kind_of(plan) != "decode":
            groups[-(-int(plan.num_scheduled.sum()) // 128) * 128].append(seconds * 1e3)
    return [
        {"tokens_up_to": tokens, "steps": len(times), "device_ms_p50": round(statistics.median(times), 3)}
        for tokens, times in sorted(groups.items())
    ]


def kernel_table(profiler: Any, most: int = 30) -> tuple[list[dict[str, Any]], float, float]:
    """Kernels by device time, the share of the profiled stretch in which no kernel ran, and its seconds."""
    spans, totals = [], defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            totals[event.name][0] += 1
            totals[event.name][1] += event.time_range.end - event.time_range.start
    spans.sort()
    covered, reached = 0.0, spans[0][0] if spans else 0.0
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0] if spans else 1.0
    table = [
        {"kernel": name[:90], "count": count, "total_us": round(total, 1), "mean_us": round(total / count, 2)}
        for name, (count, total) in sorted(totals.items(), key=lambda item: -item[1][1])[:most]
    ]
    return table, 1 - covered / whole, whole / 1e6


def profile_model(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    trace = make_workload(arguments.workload)
    limit = arguments.requests
    with tempfile.TemporaryDirectory() as parent:
        began = time.perf_counter()
        driver = Driver(
            model_folder(name, Path(parent)), device=arguments.device, load_format="dummy", max_model_len=4096,
            max_num_seqs=arguments.max_num_seqs, enforce_eager=arguments.enforce_eager, pipeline_depth=DEPTH,
            swap_space=0.0, max_cudagraph_capture_size=arguments.max_cudagraph_capture_size,
            quantization=arguments.quantization,
        )  # fmt: skip
        print(f"{name}: ready in {time.perf_counter() - began:.1f} s", flush=True)
    run_plans(driver, make_plans(driver, trace, 60))  # warm
    if arguments.device == "cuda":
        driver.synchronize()
    host, busy = HostTimes(driver), device_times(driver)
    runs = []
    for _ in range(arguments.runs):
        plans = make_plans(driver, trace, limit)
        host.steps.clear()
        busy.clear()
        began = time.perf_counter()
        results = run_plans(driver, plans)
        seconds = time.perf_counter() - began
        tokens = int(trace.output_tokens[:limit].sum())
        run = {"seconds": seconds, "output_tokens_per_s": tokens / seconds, "busy_share": sum(busy) / seconds,
               "steps": len(plans), "kinds": summary(plans, results, busy, host),
               "mixed_by_tokens": by_tokens(plans, busy)}  # fmt: skip
        print(f"{run['output_tokens_per_s']:.0f} tokens/s, busy {run['busy_share']:.1%}, {len(plans)} steps")
        for row in run["kinds"]:
            print("  ", json.dumps(row), flush=True)
        print("  ", json.dumps(run["mixed_by_tokens"]), flush=True)
        runs.append(run)
    figures: dict[str, Any] = {"model": name, "workload": arguments.workload, "runs": runs}
    if arguments.device == "cuda":
        figures["stretch"] = profile_stretch(driver, trace, limit, arguments.trace)
    driver.close()
    return figures


def profile_stretch(driver: Driver, trace: Trace, limit: int | None, out: Path | None) -> dict[str, Any]:
    """The kernels of ``PROFILED_STEPS`` steps around the middle one of the mixed steps; ``out`` gets their trace."""
    plans = make_plans(driver, trace, limit)
    mixed = [i for i, plan in enumerate(plans) if kind_of(plan) == "mixed"]
    first = max(0, mixed[len(mixed) // 2] - PROFILED_STEPS // 2) if mixed else len(plans) // 2
    chosen = plans[first : first + PROFILED_STEPS]
    run_plans(driver, plans[:first])
    with profiled() as profiler:
        run_plans(driver, chosen)
        driver.synchronize()
    run_plans(driver, plans[first + PROFILED_STEPS :])
    table, idle, seconds = kernel_table(profiler)
    kinds = [kind_of(plan) for plan in chosen]
    tokens = sum(int(plan.num_scheduled.sum()) for plan in chosen)
    print(
        f"{len(chosen)} steps from {first} on: {kinds.count('mixed')} mixed, {tokens / len(chosen):.0f} tokens each, "
        f"{seconds / len(chosen) * 1e3:.2f} ms each; no kernel in {idle:.1%} of the time"
    )
    for row in table:
        print("  ", json.dumps(row), flush=True)
    if out is not None:
        profiler.export_chrome_trace(str(out))
    return {
        "first_step": first, "mixed": kinds.count("mixed"), "tokens_mean": tokens / len(chosen),
        "step_ms_mean": seconds / len(chosen) * 1e3, "idle_share": idle, "kernels": table,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="of SHAPES, or folders with a config.json")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="chat1000")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-cudagraph-capture-size", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--trace", type=Path, help="where to write a chrome trace")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = [profile_model(name, arguments) for name in arguments.models]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
