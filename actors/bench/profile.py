"""``pagebus bench profile``: some steps of a workload as a Chrome trace and as a picture."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from pagebus.actors.bench.driver.deployment import BenchError, as_served, deployed, scratch
from pagebus.actors.bench.driver.fitting import fitted
from pagebus.actors.bench.driver.points import Workload
from pagebus.actors.bench.driver.requests import make_prompts, make_requests
from pagebus.actors.bench.engine import loras_for, served_for, warm_up, with_loras
from pagebus.actors.bench.measures.idle import report
from pagebus.actors.bench.measures.timeline import ActorSpan, chrome_trace, make_spans, picture, summary
from pagebus.actors.bench.measures.watch import Step, Watch
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.spans import read_spans


def bench_profile(arguments: argparse.Namespace, settings: Settings, workload: Workload) -> int:
    """Run the workload once, with spans, and write what its middle steps look like."""
    settings = with_loras(settings, arguments)
    workload = fitted({arguments.workload: workload}, settings, arguments.scale)[arguments.workload]
    run, scheduler, executor = asyncio.run(
        _observe(served_for(workload, settings, vars(arguments)), workload, arguments)
    )
    print(f"{report(run, make_spans(run, scheduler, executor))}\n")
    steps = middle(run, arguments.steps)
    spans = make_spans(steps, scheduler, executor)
    arguments.out.write_text(json.dumps(chrome_trace(spans, steps)) + "\n")
    print(summary(spans))
    print(f"{arguments.out}: steps {steps[0].number} to {steps[-1].number}; open it at https://ui.perfetto.dev")
    if arguments.picture:
        few = steps[: arguments.picture_steps]
        title = f"{len(few)} steps of {arguments.workload}, {Path(settings.model or 'the shipped model').name}"
        arguments.picture.write_text(str(picture(spans, title, few[0].planned_s, few[-1].done_s)), encoding="utf-8")
    return 0


async def _observe(
    settings: Settings, workload: Workload, arguments: argparse.Namespace
) -> tuple[list[Step], list[ActorSpan], list[ActorSpan]]:
    """All steps of the last run, and what scheduler and executor noted."""
    with scratch() as folder:
        served = as_served(settings, folder, span_dir=str(folder / "spans"))
        config = with_quantization(served, ModelConfig.of(served))
        adapters, point = loras_for(arguments, config, folder), workload.points[-1]
        async with deployed(served, folder / "serve.log") as deployment:
            watch = Watch(deployment)
            await watch.run(warm_up(deployment, adapters))
            for repeat in range(arguments.runs_before + 1):
                prompts = make_prompts(point.trace, deployment.vocab_size, (arguments.workload_seed, repeat))
                name = f"{point.name}-{repeat}"
                requests = make_requests(point.trace, prompts, name, point.temperature, adapters)
                run = await watch.run(requests)
        scheduler, executor = (
            read_spans(folder / "spans" / f"{actor}.jsonl") for actor in (deployment.scheduler, deployment.executor)
        )
        return run.steps, scheduler, executor


def middle(steps: list[Step], count: int) -> list[Step]:
    """``count`` steps from the middle of a run.

    Raises:
        BenchError: there are fewer.
    """
    if len(steps) < count:
        raise BenchError(f"the workload took {len(steps)} steps only, fewer than the {count} asked for")
    first = (len(steps) - count) // 2
    return steps[first : first + count]
