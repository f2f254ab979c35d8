"""``pagebus bench engine``: workloads as token ids over the bus of a real deployment, and what came of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagebus.actors.bench.driver.deployment import BenchError, Deployment, as_served, deployed, scratch
from pagebus.actors.bench.driver.fitting import fitted
from pagebus.actors.bench.driver.graphs import told_by_lease, until_captured
from pagebus.actors.bench.driver.loras import write_adapters
from pagebus.actors.bench.driver.points import Point, Workload, make_workloads
from pagebus.actors.bench.driver.requests import make_prompts, make_requests
from pagebus.actors.bench.measures.costs import Costs
from pagebus.actors.bench.measures.figures import Figures, make_figures, summary
from pagebus.actors.bench.measures.watch import Watch
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.runtime.gpus import visible_gpus
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.sources import to_args
from pagebus.actors.simulator.workloads import make_workload
from pagebus.actors.telemetry.progress import Progress
from pagebus.bus.messages import AdapterSource, GenerateRequest

DEFAULT_BUDGET = {True: 8192, False: 2048}
"""Most tokens of a step on CUDA, and on a CPU, unless it is said."""
Results = dict[str, Any]


def workloads_for(arguments: argparse.Namespace, settings: Settings, batches: Sequence[int]) -> dict[str, Workload]:
    """All workloads, in the sizes asked for."""
    return make_workloads(
        batches=batches,
        requests=arguments.requests,
        scale=arguments.scale,
        budget=settings.max_num_batched_tokens or DEFAULT_BUDGET[uses_cuda(settings)],
    )


def uses_cuda(settings: Settings) -> bool:
    return settings.device != "cpu" and bool(visible_gpus(os.environ))


def chosen(workloads: Mapping[str, Workload], names: Iterable[str]) -> dict[str, Workload]:
    """Some of the workloads.

    Raises:
        SettingsError: there is none of that name.
    """
    unknown = [name for name in names if name not in workloads]
    if unknown:
        raise SettingsError(f"no workload {unknown[0]!r}: there are {', '.join(workloads)}")
    return {name: workloads[name] for name in names}


def bench_engine(arguments: argparse.Namespace, settings: Settings) -> int:
    """Run all workloads that were asked for, print the table, write the JSON."""
    workloads = chosen(workloads_for(arguments, settings, arguments.batches), arguments.workloads)
    settings = with_loras(settings, arguments)
    workloads = fitted(workloads, settings, arguments.scale)
    results: Results = {
        "benchmark": "engine",
        "model": settings.model or "shipped",
        "settings": to_args(settings.replace(model="")),
        "scale": arguments.scale,
        "requests": arguments.requests,
        "repeats": arguments.repeats,
        "wait_for_graphs": arguments.wait_for_graphs,
        "loras": arguments.loras,
        "lora_rank": arguments.lora_rank,
        "ceilings": measure_ceilings() if uses_cuda(settings) else {},
        "points": [],
    }
    for served, names in by_settings(workloads, settings, vars(arguments)):
        part = {name: workloads[name] for name in names}
        results["points"] += asyncio.run(_run_all(served, part, arguments))
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def measure_ceilings() -> dict[str, Any]:
    """The device's measured roofline, from a separate process: this one never imports torch."""
    command = [sys.executable, "-m", "pagebus.actors.executor.device.roofline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the device's ceilings cannot be measured:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_settings(
    workloads: Mapping[str, Workload], settings: Settings, given: Iterable[str]
) -> list[tuple[Settings, list[str]]]:
    """Workloads that can share a deployment, by its settings. What a workload wants gives way to what was ``given``."""
    groups: dict[Settings, list[str]] = {}
    for name, workload in workloads.items():
        groups.setdefault(served_for(workload, settings, given), []).append(name)
    return list(groups.items())


def served_for(workload: Workload, settings: Settings, given: Iterable[str]) -> Settings:
    """The settings with which a workload is served."""
    defaults = Settings()
    wanted = {
        key: value
        for key, value in workload.settings.items()
        if key not in given and getattr(settings, key) == getattr(defaults, key)
    }
    return settings.replace(**wanted)


def with_loras(settings: Settings, arguments: argparse.Namespace) -> Settings:
    """Settings with which all adapters of ``--loras`` are in one step. What was given goes before them."""
    wanted = {"enable_lora": True, "max_loras": arguments.loras, "max_lora_rank": arguments.lora_rank}
    given = vars(arguments)
    return settings.replace(**{key: each for key, each in wanted.items() if key not in given and arguments.loras})


async def _run_all(
    settings: Settings, workloads: Mapping[str, Workload], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every point of the workloads, ``--repeats`` times, on one deployment."""
    repeats, seed = arguments.repeats, arguments.workload_seed
    with scratch() as folder:
        served = as_served(settings, folder)
        config = with_quantization(served, ModelConfig.of(served))
        adapters = loras_for(arguments, config, folder)
        async with deployed(served, folder / "serve.log") as deployment:
            watch, costs = Watch(deployment), Costs.of(config, deployment.info)
            progress = Progress(sys.stderr, terminal=sys.stderr.isatty())
            await watch.run(warm_up(deployment, adapters))
            if arguments.wait_for_graphs:
                await until_captured(told_by_lease(deployment), progress)
            rows = []
            for workload in workloads.values():
                runs: dict[str, list[Figures]] = {point.name: [] for point in workload.points if point.shown}
                for repeat in range(repeats):
                    for number, point in enumerate(workload.points):
                        progress.show(f"{point.name}, run {repeat + 1} of {repeats}")
                        requests = _requests_of(point, deployment, (seed, repeat), number, adapters)
                        run = await watch.run(requests, scheduler=point.shown and repeat == repeats - 1)
                        if point.shown:
                            runs[point.name].append(make_figures(run, costs, batch=point.batch))
                rows += [{"name": name, "figures": summary(each), "runs": each} for name, each in runs.items()]
            progress.done()
    return rows


def loras_for(arguments: argparse.Namespace, config: ModelConfig, folder: Path) -> Sequence[AdapterSource]:
    """The adapters that requests take turns with: ``--loras`` random ones of rank ``--lora-rank``, in ``folder``."""
    if not arguments.loras:
        return ()
    return write_adapters(folder / "loras", config, arguments.loras, arguments.lora_rank)


def _requests_of(
    point: Point, deployment: Deployment, seed: Sequence[int], number: int, adapters: Sequence[AdapterSource]
) -> list[GenerateRequest]:
    """The point's requests. Prompts begin alike within a workload and a repeat only."""
    workload = zlib.crc32(point.name.partition("/")[0].encode())
    prompts = make_prompts(point.trace, deployment.vocab_size, (*seed, workload), number)
    name = "-".join(map(str, (point.name, *seed, number)))
    return make_requests(point.trace, prompts, name, point.temperature, adapters)


def warm_up(deployment: Deployment, adapters: Sequence[AdapterSource] = ()) -> list[GenerateRequest]:
    """A few requests that are not counted; each adapter has one, so that it is read."""
    trace = make_workload("single", requests=max(4, len(adapters)))
    max_model_len = int(deployment.info["max_model_len"])
    trace.shorten(max_model_len // 2, max_model_len // 4)
    return make_requests(trace, make_prompts(trace, deployment.vocab_size, (2**31,)), "warm-up", 0.6, adapters)


# -- the table --------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("output tok/s", "output_tokens_per_s", "{:.0f}"),
    ("prompt tok/s", "prompt_tokens_per_s", "{:.0f}"),
    ("step ms", "step_ms_mean", "{:.3f}"),
    ("p50", "step_ms_p50", "{:.3f}"),
    ("p99", "step_ms_p99", "{:.3f}"),
    ("TTFT p50", "ttft_ms_p50", "{:.1f}"),
    ("p99", "ttft_ms_p99", "{:.1f}"),
    ("ITL p50", "itl_ms_p50", "{:.2f}"),
    ("p99", "itl_ms_p99", "{:.2f}"),
    ("GPU busy", "gpu_busy_share", "{:.1%}"),
    ("sched. ms", "scheduler_ms", "{:.3f}"),
    ("plan ms", "plan_ms", "{:.3f}"),
    ("result ms", "result_ms", "{:.3f}"),
    ("TB/s", "tb_per_s", "{:.2f}"),
    ("TFLOP/s", "tflop_per_s", "{:.1f}"),
)
CEILINGS = {"tb_per_s": "copy_tb_per_s", "tflop_per_s": "gemm_tflop_per_s"}
"""Figures that are shown with their share of a ceiling."""


def table(results: Results) -> str:
    """The medians of all points; below them the ceilings."""
    head = ["workload", *(title for title, _, _ in COLUMNS), "spread"]
    rows = [head, *(_row(point, results["ceilings"]) for point in results["points"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in cells).rstrip()
        for cells in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    ]
    lines.append(f"{results['model']}: medians of {results['repeats']} runs; spread: lowest to highest output tokens/s")
    ceilings = results["ceilings"]
    if ceilings:
        lines.append(
            f"{ceilings['device']}: copies at {ceilings['copy_tb_per_s']:.2f} TB/s, "
            f"bfloat16 products at {ceilings['gemm_tflop_per_s']:.0f} TFLOP/s"
        )
    return "\n".join(lines)


def _row(point: Mapping[str, Any], ceilings: Mapping[str, Any]) -> Sequence[str]:
    figures, cells = point["figures"], []
    for _, key, text in COLUMNS:
        value = figures[key]["median"] if key in figures else None
        cell = "-" if value is None else text.format(value)
        if value is not None and CEILINGS.get(key) in ceilings:
            cell += f" ({value / ceilings[CEILINGS[key]]:.0%})"
        cells.append(cell)
    rate = figures["output_tokens_per_s"]
    return [point["name"], *cells, f"{(rate['high'] - rate['low']) / rate['median']:.1%}"]
