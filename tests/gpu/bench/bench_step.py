"""One decode step of the engine alone (no bus, no scheduler), and how busy the GPU is meanwhile.

    python -m tests.gpu.bench.bench_step llama8b qwen06b [--batches 1 32 256] [--repeats 3] [--kv-cache-dtype fp8]
        [--json FILE] [--enforce-eager] [--quantization fp8]

Random weights of the published shapes; prompts of 512 tokens, 128 decode steps. All plans are made beforehand, two are
in flight. A step is the median time between two results; the busy share is the device time by CUDA events over the
wall time of the decode phase; "host" is what the device thread took per step to check and launch it. With repeats,
figures are their medians, and the lowest and the highest step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.bus.messages import StepPlan, StepResult
from tests.helpers.engine_driver import Driver

PROMPT_TOKENS, OUTPUT_TOKENS, DEPTH = 512, 129, 2
WARM_STEPS = 8


def make_plans(driver: Driver, batch: int, **params: Any) -> list[StepPlan]:
    """Every plan of ``batch`` sequences from prompt to last token; none ends early, so tokens need not be known.
    ``params``: fields of :class:`pagebus.bus.messages.NewSequence`."""
    scheduler = driver.scheduler()
    rng = random.Random(batch)
    vocab_size = driver.info.vocab_size
    for i in range(batch):
        prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        scheduler.add(prompt, OUTPUT_TOKENS, **{"temperature": 0.6, "seed": i, **params})
    plans = []
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    return plans


def run_plans(driver: Driver, plans: list[StepPlan]) -> list[StepResult]:
    """Submit with ``DEPTH`` in flight; all results."""
    results: list[StepResult] = []
    for number, plan in enumerate(plans):
        if number >= DEPTH:
            results.append(driver.result())
        driver.engine.submit(plan, driver.epoch)
    while len(results) < len(plans):
        results.append(driver.result())
    return results


def measure(driver: Driver, batch: int, **params: Any) -> dict[str, Any]:
    """Figures of one batch size."""
    plans = make_plans(driver, batch, **params)
    first = next(i for i, plan in enumerate(plans) if plan.num_decodes == batch) + WARM_STEPS
    run_plans(driver, plans[:first])
    stats = driver.engine.stats
    busy_s, host_s, steps, began = stats.busy_s, stats.host_s, stats.steps, time.perf_counter()
    results = run_plans(driver, plans[first:])
    wall_s = time.perf_counter() - began
    gaps = [(b.done_s - a.done_s) * 1e3 for a, b in itertools.pairwise(results)]
    count = stats.steps - steps
    return {
        "batch": batch,
        "step_ms": statistics.median(gaps),
        "step_p99_ms": sorted(gaps)[int(len(gaps) * 0.99)],
        "device_ms": (stats.busy_s - busy_s) / count * 1e3,
        "host_ms": (stats.host_s - host_s) / count * 1e3,
        "busy_share": (stats.busy_s - busy_s) / wall_s,
        "steps": count,
    }


def measure_again(driver: Driver, batch: int, repeats: int) -> dict[str, Any]:
    """Medians of several measurements, and the lowest and highest step time of them."""
    runs = [measure(driver, batch) for _ in range(repeats)]
    steps = [run["step_ms"] for run in runs]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {**medians, "step_ms_low": min(steps), "step_ms_high": max(steps)}


def bench_model(name: str, batches: list[int], repeats: int, **settings: Any) -> dict[str, Any]:
    """All batches of one model, in one engine."""
    gc.collect()  # the engine before this one
    torch.cuda.empty_cache()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as parent:
        driver = Driver(
            write_model_folder(name, Path(parent)), device="cuda", load_format="dummy", max_model_len=8192,
            max_num_seqs=max(batches), pipeline_depth=DEPTH, **settings,
        )  # fmt: skip
    ready_s = time.perf_counter() - began
    driver.synchronize()  # all graphs are there
    rows = [measure_again(driver, batch, repeats) for batch in batches]
    driver.close()
    info = driver.info
    print(f"\n{name}: ready in {ready_s:.1f} s, {info.num_blocks} blocks, {info.dtype}, cache {info.kv_cache_dtype}")
    columns = ("batch", "step ms", "lowest", "highest", "p99 ms", "device ms", "host ms", "busy")
    print("".join(f"{column:>10}" for column in columns))
    for row in rows:
        print(
            f"{row['batch']:>10} {row['step_ms']:>9.3f} {row['step_ms_low']:>9.3f} {row['step_ms_high']:>9.3f} "
            f"{row['step_p99_ms']:>9.3f} {row['device_ms']:>9.3f} {row['host_ms']:>9.3f} {row['busy_share']:>9.1%}"
        )
    return {"model": name, "ready_s": ready_s, "num_blocks": info.num_blocks, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), help="of random weights")
    parser.add_argument("--enforce-eager", action="store_true")
    arguments = parser.parse_args()
    settings = {
        "kv_cache_dtype": arguments.kv_cache_dtype, "enforce_eager": arguments.enforce_eager,
        "quantization": arguments.quantization,
    }  # fmt: skip
    figures = [bench_model(name, arguments.batches, arguments.repeats, **settings) for name in arguments.models]
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "models": figures}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
