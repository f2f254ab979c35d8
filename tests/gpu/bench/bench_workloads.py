"""Whole workloads on a dummy-weight model served over Redis, beside what the simulator predicts for them.

    python -m tests.gpu.bench.bench_workloads llama8b --workloads chat1000 --seeds 0 7 [--record FOLDER] [--json FILE]

Starts ``pagebus serve --load-format dummy``, submits the requests of the workloads
of :mod:`pagebus.actors.simulator.workloads` as token ids over the bus (all at once, greedy, ``ignore_eos``), and reads
the executor's results. Output tokens per second count from the first submission to the last token. With ``--record``
every run is also recorded by ``pagebus record``, for ``pagebus simulate`` and ``python -m
pagebus.actors.simulator.fit``.

Beside each run stands what the simulator says with the profile ``h200-<model>`` for the same requests. The profiles are
fitted to seed 0, so other seeds show how well they predict. Figures that were measured once are compared again,
without a GPU, by ``python -m tests.gpu.bench.bench_workloads --compare FILE [--profile FILE]``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from pagebus.actors.bench.driver.deployment import Deployment as Served
from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.actors.settings import Settings
from pagebus.actors.simulator.deployment import Deployment
from pagebus.actors.simulator.profile import Profile, load_profile
from pagebus.actors.simulator.recording.trace import Trace
from pagebus.actors.simulator.report import make_report
from pagebus.actors.simulator.workloads import WORKLOADS, make_workload
from pagebus.bus.contract import EntryId
from pagebus.bus.messages import GenerateRequest, SamplingParams, StepResult
from tests.gpu.served import recorded, served

DEFAULT_WORKLOADS = ["prefill", "mixed256", "chat1000"]
SETTLE_S = 4.0
"""After a start, and after the first steps with prompts: graphs of the steps to come are captured meanwhile."""
COMPARED = ("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s")


def requests_of(trace: Trace, vocab_size: int, run: str) -> list[GenerateRequest]:
    """The trace's requests with random prompts, which share no prefix."""
    rng = np.random.default_rng(1)
    return [
        GenerateRequest(
            request_id=f"{run}-{index}",
            ingress="bench",
            sampling=SamplingParams(max_tokens=int(output), temperature=0.0, ignore_eos=True),
            prompt_token_ids=rng.integers(0, vocab_size, int(prompt), dtype=np.int32),
        )
        for index, (prompt, output) in enumerate(zip(trace.prompt_tokens, trace.output_tokens, strict=True))
    ]


async def run_trace(served: Served, trace: Trace, run: str) -> dict[str, float]:
    """Submit all requests at once and watch the results until the last token."""
    bus, stream = served.bus, served.names.results(served.executor)
    position: EntryId = await bus.last_id(stream)
    requests = requests_of(trace, served.vocab_size, run)
    started = time.time()
    await bus.publish((served.names.requests, request) for request in requests)
    left = int(trace.output_tokens.sum())
    first_tokens: list[float] = []
    done_s = started
    while left > 0:
        for entry in await bus.read({stream: position}, count=2000, block_ms=1000):
            position = entry.id
            result = entry.message
            if isinstance(result, StepResult) and len(result.token_ids):
                left -= len(result.token_ids)
                done_s = result.done_s
                first_tokens += [result.done_s - started] * int(np.count_nonzero(result.token_indexes == 0))
    seconds = done_s - started
    return {
        "requests": len(requests),
        "seconds": seconds,
        "output_tokens_per_s": float(trace.output_tokens.sum()) / seconds,
        "prompt_tokens_per_s": float(trace.prompt_tokens.sum()) / seconds,
        "ttft_p50_s": float(np.quantile(first_tokens, 0.5)),
        "ttft_p99_s": float(np.quantile(first_tokens, 0.99)),
    }


def predict(profile: Profile, trace: Trace) -> dict[str, float]:
    """What the simulator says of the same requests on the same server."""
    settings = Settings(max_num_seqs=256, max_model_len=8192, enable_prefix_caching=False)
    deployment = Deployment(trace, profile, settings)
    deployment.run()
    report = make_report(deployment)
    return {
        "output_tokens_per_s": report["throughput"]["output_tokens_per_s"],
        "ttft_p50_s": report["ttft_ms"]["p50"] / 1e3,
        "ttft_p99_s": report["ttft_ms"]["p99"] / 1e3,
    }


def predict_row(model: str, row: dict[str, Any], profile: str = "") -> dict[str, float]:
    """What the simulator says of a run that was measured."""
    return predict(load_profile(profile or f"h200-{model}"), make_workload(row["workload"], seed=row["seed"]))


def compare(model: str, row: dict[str, Any], profile: str = "") -> str:
    """One line: measured, predicted, and how far off the prediction is."""
    said = predict_row(model, row, profile)
    parts = [f"{name} {row[name]:.5g}, said {said[name]:.5g} ({said[name] / row[name] - 1:+.1%})" for name in COMPARED]
    return f"{model} {row['workload']:10s} seed {row['seed']}: " + "; ".join(parts)


async def bench(
    name: str, workloads: list[str], seeds: list[int], record: Path | None, extra: list[str]
) -> dict[str, Any]:
    rows = []
    async with served(name, extra) as deployment:
        for warm, requests in (("single", 4), ("chat", 200)):
            await run_trace(deployment, make_workload(warm, requests=requests, seed=1), warm)
            await asyncio.sleep(SETTLE_S)
        for seed, workload in itertools.product(seeds, workloads):
            run = f"{workload}-{seed}"
            async with recorded(deployment, record and record / f"{name}-{run}.jsonl"):
                figures = await run_trace(deployment, make_workload(workload, seed=seed), run)
            rows.append({"workload": workload, "seed": seed, **figures})
            print(name, json.dumps(rows[-1]), flush=True)
    return {"model": name, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*sorted(SHAPES), []])
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=DEFAULT_WORKLOADS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, help="figures that --json wrote: measure nothing")
    parser.add_argument("--profile", default="", help="predict with this one")
    args, extra = parser.parse_known_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.compare:
        results = json.loads(args.compare.read_text())
    else:
        results = [asyncio.run(bench(name, args.workloads, args.seeds, args.record, extra)) for name in args.models]
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    for result in results:
        for row in result["rows"]:
            print(compare(result["model"], row, args.profile), flush=True)


if __name__ == "__main__":
    main()
