"""A step of few new tokens behind a long cached past: its attention by launch shape, and where the step's time goes.

    python -m tests.gpu.moves.bench_few [--only kernels step] [--model llama8b]

First prefill attention of a llama8b layer over pages, in each of some launch shapes. Then an engine without bus and
scheduler process: prompts whose last chunk has 24 tokens behind 15,000; that step's time on the device, beside a decode
step behind as many, and its kernels by torch's profiler.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pagebus.actors.bench.driver.shapes import write_model_folder
from pagebus.kernels.attention.prefill import plan_prefills, prefill_attention
from pagebus.kernels.attention.prefill_plan import (
    PrefillConfig,
    few_config,
    most_merges,
    most_pieces,
    prefill_config,
    query_ranges,
    query_spans,
)
from pagebus.kernels.attention.reference import paged_attention_reference
from pagebus.kernels.common.target import num_multiprocessors
from tests.gpu.bench.bench_kernels import CUDA, HEAD_DIM, KV_HEADS, Q_HEADS, Cache, graph_microseconds, ints
from tests.gpu.bench.profile_steps import device_times, kernel_table, profiled
from tests.helpers.engine_driver import Driver

PAST, FEW = 15_000, 24
PLAIN = prefill_config(0, 0, HEAD_DIM, 2)
SHAPES = (
    PLAIN,
    few_config(PLAIN, 4),
    replace(PLAIN, block_queries=16, heads=4),
    replace(PLAIN, block_queries=32, heads=4, num_warps=8, num_stages=2),
    replace(PLAIN, block_queries=16, heads=4, tile=128, num_stages=2),
    replace(PLAIN, block_queries=8, heads=4),
    replace(PLAIN, block_queries=4, heads=4),
)
CASES = (
    (1, 24, PAST),
    (1, 24, 1000),
    (1, 24, 4000),
    (1, 24, 8000),
    (1, 8, PAST),
    (1, 32, PAST),
    (1, 64, PAST),
    (1, 24, 0),
    (4, 8, 4096),
    (16, 2, 1024),
)
"""Rows, new tokens of each, and the past of each."""


def kernel_time(cache: Cache, rows: int, queries: int, past: int, config: PrefillConfig) -> tuple[float, float, int]:
    """Microseconds of a layer, as in a graph of a step of 32 tokens; the largest error; and the number of pieces."""
    q = torch.randn(rows * queries, Q_HEADS, HEAD_DIM, device=CUDA).bfloat16()
    out, table, slots = torch.empty_like(q), cache.table(rows, past + queries), ints(range(rows))
    starts, lens = ints(range(0, rows * queries + 1, queries)), ints([past + queries] * rows)
    programs, tile_rows = Q_HEADS if config.heads == 1 else KV_HEADS, config.block_queries * config.heads
    shares = (1 if tile_rows * config.num_warps > 256 else 2) * num_multiprocessors(CUDA) // programs
    on_host = starts.cpu().numpy()
    host = query_spans(on_host, lens.cpu().numpy(), query_ranges(on_host, 0), config, shares, 33)
    pad = torch.nn.functional.pad
    spans = pad(torch.from_numpy(host.spans), (0, 0, 0, 33 - len(host.spans)), value=-1)
    merges = pad(torch.from_numpy(host.merges), (0, 0, 0, most_merges(shares) - len(host.merges)))
    plan = plan_prefills(spans.to(CUDA), merges.to(CUDA), config, Q_HEADS, HEAD_DIM, most_pieces(shares))

    def attend(layer: int) -> None:
        (k, v), scales = cache.layer(layer), cache.scales_of(layer)
        prefill_attention(q, k, v, out, slots, starts, lens, table, HEAD_DIM**-0.5, 0, plan, scales)

    attend(0)
    expected = paged_attention_reference(
        q, *cache.layer(0), slots=slots, query_start=starts, context_lens=lens, block_tables=table,
        scale=HEAD_DIM**-0.5, num_decodes=0,
    )  # fmt: skip
    error = float((out.float() - expected.float()).abs().max())
    calls = [lambda layer=layer: attend(layer) for layer in range(4)]
    return graph_microseconds(calls, replays=5), error, len(host.spans)


def kernels(shapes: Sequence[PrefillConfig]) -> None:
    """All cases in all launch shapes."""
    cache = Cache(2048)
    for rows, queries, past in CASES:
        for config in shapes:
            try:
                time_us, error, count = kernel_time(cache, rows, queries, past, config)
            except Exception as problem:  # such as no room for its tiles
                print(f"{rows} x {queries} behind {past}: {config}: {type(problem).__name__} {str(problem)[:80]}")
                continue
            print(f"{rows} x {queries} behind {past}: {time_us:7.1f} us  {count:3d} spans  error {error:.4f}  {config}",
                  flush=True)  # fmt: skip


def step(model: str) -> None:
    """The engine's steps."""
    with tempfile.TemporaryDirectory() as parent:
        driver = Driver(
            write_model_folder(model, Path(parent)), device="cuda", load_format="dummy", max_model_len=16384,
            max_num_seqs=64, max_num_batched_tokens=5000, pipeline_depth=2, swap_space=0.0, spec_method="none",
        )  # fmt: skip
    driver.synchronize()
    busy, rng = device_times(driver), random.Random(0)
    for count in (FEW, 8, 60):
        last, decodes, host = [], [], []
        for number in range(4):
            scheduler = driver.scheduler()
            scheduler.add([rng.randrange(30_000) for _ in range(PAST + count)], 6)
            while (plan := scheduler.plan()) is not None:
                is_last = plan.num_scheduled.sum() == count
                if is_last and number == 3 and count == FEW:
                    with profiled() as profiler:
                        result = driver.run_plan(plan)
                        torch.cuda.synchronize()
                    table, idle, seconds = kernel_table(profiler)
                    print(f"profiled: {seconds * 1e3:.2f} ms, {idle:.1%} of it without a kernel")
                    for row in table:
                        print("  ", row)
                else:
                    result = driver.run_plan(plan)
                    if is_last:
                        last.append(busy[-1] * 1e3)
                        host.append((result.done_s - result.launched_s) * 1e3)
                    elif plan.num_decodes:
                        decodes.append(busy[-1] * 1e3)
                scheduler.process(result)
            if number == 0 and count == FEW:  # the same prompt, the last tokens of which have another launch shape
                others = driver.scheduler(budget=4996)
                again = others.add(scheduler.all[1].prompt, 6)
                driver.drive(others)
                print(f"tokens {scheduler.all[1].output}, in other chunks {again.output}")
        runner = driver.engine._loaded.runner
        print(f"{count} behind {PAST}: device {[round(each, 3) for each in last]}, launched to done "
              f"{[round(each, 3) for each in host]} ms; a decode {statistics.median(decodes):.3f} ms; {runner.kernels}",
              flush=True)  # fmt: skip
    driver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["step", "kernels"])
    parser.add_argument("--model", default="llama8b")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only so many launch shapes")
    asked = parser.parse_args()
    if "step" in asked.only:
        step(asked.model)
    if "kernels" in asked.only:
        kernels(SHAPES[: asked.shapes])


if __name__ == "__main__":
    main()
