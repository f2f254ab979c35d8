"""Steps with prompts beside decodes, run each way there is: from one CUDA graph, in pieces, kernel by kernel.

    python -m tests.gpu.bench.bench_mixed llama8b [--steps 1400+8x100 ...] [--layers 512 1408 ...] [--kernels] [--json
    FILE]

``1400+8x100``: 1400 prompt tokens in 8 rows beside 100 decodes (of 400 tokens each), without an engine around it. For
each way the time of a step on the device, steps queued one behind the other on a GPU that is hot, and what the host
takes to launch one. ``--layers``: how long everything but attention takes of so many tokens, all layers, from a graph.
``--kernels``: the kernels of a step the first of these ways.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor.batch.layout import TEMPERATURE, BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.graphs import Graphs, _run_empty
from pagebus.actors.executor.graphs.piecewise_graphs import run_piece
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.memory.kv_cache import Cache, allocate_kv_cache
from pagebus.actors.executor.models import build_model
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.model.config import ModelConfig

CUDA = torch.device("cuda", 0)
BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS, MAX_LEN, MOST_TOKENS, CONTEXT = 16, 16384, 256, 8192, 8192, 400
WAYS = {"whole": (MOST_TOKENS, 0), "pieces": (1, MOST_TOKENS), "eager": (1, 0)}
"""How many tokens a graph, and pieces, may have."""
DEFAULT_STEPS = ["512+4x100", "1024+4x100", "1400+8x30", "1400+8x100", "1650+8x30", "2048+8x100", "280+2x250"]


class MixedSteps:
    """One model of random weights, and a runner for each way."""

    def __init__(self, name: str) -> None:
        torch.cuda.set_device(CUDA)
        with tempfile.TemporaryDirectory() as parent:
            folder = write_model_folder(name, Path(parent))
            config = ModelConfig.load(folder)
            limits = BatchLimits(
                max_num_seqs=MAX_ROWS, max_model_len=MAX_LEN, max_num_batched_tokens=MOST_TOKENS,
                block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=config.vocab_size,
            )  # fmt: skip
            ops = Ops.for_device(CUDA)
            self.model = build_model(config, CUDA, torch.bfloat16, ops, MAX_LEN, torch.bfloat16)
            load_weights(self.model, folder, "dummy", 0, lambda _share: None)
        cache = allocate_kv_cache(config, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, CUDA)
        for blocks in cache.split(1024):
            blocks.normal_()
        self.runners = {
            way: Runner(self.model, ops, limits, CUDA, Cache(cache, cache), 2, whole, pieces_tokens=pieces)
            for way, (whole, pieces) in WAYS.items()
        }
        order = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
        width = limits.table_width
        rows, columns = np.arange(MAX_ROWS + 1)[:, None], np.arange(width)
        tables = np.take(order, rows * (NUM_BLOCKS // MAX_ROWS) + columns, mode="wrap")
        for way, runner in self.runners.items():
            state = runner.state
            state.columns.view(torch.float32)[TEMPERATURE].fill_(0.6)
            state.tokens.random_(0, config.vocab_size)
            state.block_tables.copy_(torch.from_numpy(tables))
            if way != "eager":
                runner.graphs = Graphs(runner.buckets)

    def capture(self, way: str, work: StepWork) -> None:
        """What the step needs, if that is not there."""
        runner = self.runners[way]
        if runner.graphs is None:
            return
        bucket = runner.buckets.fitting(work)
        if bucket is not None and bucket not in runner.graphs._captured:
            _run_empty(runner, bucket)  # kernels compiled
            torch.cuda.synchronize()
            runner.graphs._capture(runner, bucket)

    def layers(self, num_tokens: int) -> torch.cuda.CUDAGraph:
        """The graph of all layers for so many tokens, attention left out."""
        tokens, model = self.runners["eager"].tokens(num_tokens), self.model
        tokens.slot_mapping.fill_(-1)
        config = model.config
        attended = torch.randn(num_tokens, config.num_heads * config.head_dim, device=CUDA).to(torch.bfloat16)

        def run() -> None:
            residual: torch.Tensor | None = None
            for index, layer in enumerate(model.layers):
                residual, _ = run_piece(model, index, residual, tokens)
                stream = ResidualStream(residual, model.ops)
                stream.add(attended, layer.attention.out, None)
                stream.settle()

        with torch.inference_mode():
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        return graph


def make_step(prompt_tokens: int, prompts: int, decodes: int) -> StepWork:
    """Prompts of about equal length without a past, and decodes."""
    counts = np.full(prompts, prompt_tokens // prompts, np.int32)
    counts[: prompt_tokens % prompts] += 1
    scheduled = np.concatenate((np.ones(decodes, np.int32), counts))
    rows = np.arange(decodes + prompts, dtype=np.int32)
    starts = np.concatenate((np.full(decodes, CONTEXT - 1, np.int32), np.zeros(prompts, np.int32)))
    query_start = np.concatenate(([0], np.cumsum(scheduled))).astype(np.int32)
    ends = starts + scheduled
    none = np.zeros(len(rows), np.bool_)
    return StepWork(
        num_decodes=decodes, num_tokens=int(query_start[-1]), max_query_len=int(scheduled.max()),
        max_context_len=int(ends.max()), slots=rows, starts=starts, query_start=query_start, positions=ends,
        indexes=np.zeros(len(rows), np.int32), hidden_index=query_start[1:] - np.int32(1), context_lens=ends,
        sample_slots=rows, sequence_ids=rows, length_ended=none, can_stop=none, end_ids=np.full((len(rows), 2), -1),
        deltas={}, any_random=True,
    )  # fmt: skip


def parse_step(text: str) -> StepWork:
    """``1400+8x100``."""
    prompt_tokens, rows = text.split("+")
    prompts, decodes = map(int, rows.split("x"))
    return make_step(int(prompt_tokens), prompts, decodes)


def device_ms(launch: Callable[[], object], count: int) -> float:
    """Median time between the ends of launches that are queued one behind the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    for event in events:
        launch()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def host_ms(launch: Callable[[], object], count: int = 5) -> float:
    """Median time that one launch takes on a device that has nothing to do."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        launch()
        times.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def kernels_of(launch: Callable[[], object], count: int = 3) -> list[tuple[float, float, str]]:
    """(milliseconds per step, calls per step, name) of each kernel; the last one is the time in which none ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            launch()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            totals[event.name][0] += event.time_range.end - event.time_range.start
            totals[event.name][1] += 1
    reached, idle = min(start for start, _ in spans), 0.0
    for start, end in sorted(spans):
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    rows = [(total / count / 1e3, calls / count, name[:70]) for name, (total, calls) in totals.items()]
    return [*sorted(rows, reverse=True), (idle / count / 1e3, 0.0, "no kernel")]


def heat(launch: Callable[[], object], seconds: float) -> None:
    """The clock of a GPU that computes falls within a second."""
    ended = time.perf_counter() + seconds
    while time.perf_counter() < ended:
        launch()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--steps", nargs="*", default=DEFAULT_STEPS)
    parser.add_argument("--layers", nargs="*", type=int, default=[])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "model": arguments.model}
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        steps = MixedSteps(arguments.model)
        report["steps"] = measure_steps(steps, arguments)
        report["layers"] = measure_layers(steps, arguments.layers)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def measure_steps(steps: MixedSteps, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(f"{'step':>14} {'tokens':>7}" + "".join(f"{way + ' ms':>12}{'host ms':>9}" for way in arguments.ways))
    for text in arguments.steps:
        work = parse_step(text)
        row: dict[str, Any] = {"step": text, "tokens": work.num_tokens}
        for way in arguments.ways:
            steps.capture(way, work)
        runs = {way: functools.partial(steps.runners[way].run, work) for way in arguments.ways}
        heat(runs[arguments.ways[0]], 0.4)
        for way, run in runs.items():
            row[way] = {"device_ms": device_ms(run, arguments.count), "host_ms": host_ms(run)}
        cells = "".join(f"{row[way]['device_ms']:12.2f}{row[way]['host_ms']:9.2f}" for way in arguments.ways)
        print(f"{text:>14} {work.num_tokens:7}{cells}", flush=True)
        if arguments.kernels:
            row["kernels"] = kernels_of(runs[arguments.ways[0]])
            for milliseconds, calls, name in [*row["kernels"][:16], row["kernels"][-1]]:
                print(f"    {milliseconds:8.3f} ms {calls:6.1f} x  {name}")
        rows.append(row)
    return rows


def measure_layers(steps: MixedSteps, sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for num_tokens in sizes:
        graph = steps.layers(num_tokens)
        heat(graph.replay, 0.15)
        milliseconds = device_ms(graph.replay, 6)
        rows.append({"tokens": num_tokens, "ms": milliseconds})
        print(f"{num_tokens:6} tokens: {milliseconds:7.3f} ms, {num_tokens / milliseconds:5.1f} per ms", flush=True)
    return rows


if __name__ == "__main__":
    main()
