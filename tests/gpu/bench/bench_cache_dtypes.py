"""What a cache in bfloat16, FP8 and int8 costs: attention, decode steps, a workload, and log probabilities.

    python -m tests.gpu.bench.bench_cache_dtypes [--parts kernels steps error mixed] [--variants] [--json FILE]

Kernels: microseconds that attention adds to a layer of Llama-3.1-8B in decodes (see `bench_kernels.decode_time`), and
that prompts take alone. --variants also times other launch shapes over int8. Steps: replays of the decode step's CUDA
graph for llama8b, without an engine. Error: see `tests.gpu.engine.cache_error`. Mixed: output tokens per second of
`mixed256`, served over Redis, one run after warm-up for each format.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache
from pagebus.kernels.attention.forms.launch import DecodeConfig, decode_config
from pagebus.kernels.attention.prefill_plan import prefill_config
from pagebus.kernels.common.target import num_multiprocessors
from tests.gpu.bench import bench_kernels
from tests.gpu.bench.bench_kernels import HEAD_DIM, KV_HEADS, Cache, decode_time, prefill_time

FORMATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DECODES = {
    "256 of 576": [576] * 256, "131 as mixed256": [100 + (row * 997) % 1500 for row in range(131)],
    "64 of 576": [576] * 64, "32 of 576": [576] * 32, "8 of 576": [576] * 8, "1 of 576": [576], "8 of 8192": [8192] * 8,
}  # fmt: skip
PROMPTS = ((16, 512, 512), (4, 2048, 2048), (8, 64, 4096))
"""Rows, new tokens and context of each."""
VARIANTS = [(64, 4, 2, 4), (64, 4, 3, 3), (64, 2, 3, 6), (64, 2, 2, 8), (32, 1, 3, 12), (128, 4, 2, 3)]
"""Tile, warps, stages, programs per multiprocessor."""
STEPS = ((1, 576), (32, 576), (256, 576), (8, 8192))


def bench_decodes(*, variants: bool) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    processors = num_multiprocessors(bench_kernels.CUDA)
    for name, dtype in FORMATS.items():
        cache, bench = Cache(14_000, dtype), f"decode us/layer {name}"
        shipped = decode_config(KV_HEADS, HEAD_DIM, 2, processors, float8=dtype.itemsize == 1)
        found[bench] = {shape: decode_time(cache, lens, shipped) for shape, lens in DECODES.items()}
        show(bench, found[bench])
        found[f"prompts us/layer {name}"] = prompts = {
            f"{rows} x {queries} on {context}": prefill_time(
                cache, rows, queries, context, prefill_config(queries, context, HEAD_DIM, 2), cut=True
            )
            for rows, queries, context in PROMPTS
        }  # fmt: skip
        show(f"prompts us/layer {name}", prompts)
        for tile, warps, stages, programs in VARIANTS if variants and dtype == torch.int8 else ():
            config = DecodeConfig(tile, programs * processors // KV_HEADS, warps, stages)
            bench = f"T{tile} w{warps} s{stages} {programs} per SM"
            found[bench] = {shape: decode_time(cache, DECODES[shape], config) for shape in list(DECODES)[:4]}
            show(bench, found[bench])
        del cache
        free()
    return found


def bench_steps() -> dict[str, dict[str, float]]:
    """Milliseconds; one model, whose cache is another each time."""
    from pagebus.actors.executor.tuning.decode_step import BLOCK_SIZE, fill
    from tests.gpu.bench.decode_step import CUDA, DecodeStep, replay_ms

    step, found = DecodeStep("llama8b", 256, 8192, 256 * 600, torch.float8_e4m3fn), {}
    for name in ("fp8", "int8", "fp8 again", "int8 again"):
        step.runner.kv_cache = None
        free()
        dtype = FORMATS[name.split()[0]]
        step.runner.kv_cache = allocate_kv_cache(step.config, step.limits.num_blocks, BLOCK_SIZE, dtype, CUDA)
        fill(step.runner.kv_cache, step.config)
        found[name] = {}
        for rows, context in STEPS:
            graph = step.capture(rows, context)
            found[name][f"{rows} of {context}"] = replay_ms(graph.replay)
            del graph
        show(f"step ms {name}", found[name])
    return found


def bench_error() -> dict[str, dict[str, float]]:
    from tests.gpu.engine.cache_error import measure

    return measure(9500, 1024, 4, torch.device("cuda"))


def bench_mixed() -> dict[str, dict[str, float]]:
    from tests.gpu.bench.bench_workloads import bench

    found = {}
    for name in ("fp8", "int8"):
        extra = ["--kv-cache-dtype", name]
        (row,) = asyncio.run(bench("llama8b", ["mixed256"], [0], None, extra))["rows"]
        found[f"mixed256 {name}"] = {"output_tokens_per_s": row["output_tokens_per_s"], "ttft_p50_s": row["ttft_p50_s"]}
    return found


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def show(name: str, figures: dict[str, float]) -> None:
    print(f"{name:24}", "  ".join(f"{shape}: {value:.2f}" for shape, value in figures.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["kernels", "steps", "error", "mixed"])
    parser.add_argument("--variants", action="store_true", help="other launch shapes over int8 too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    parts: dict[str, Callable[[], Any]] = {
        "kernels": lambda: bench_decodes(variants=options.variants), "steps": bench_steps, "error": bench_error,
        "mixed": bench_mixed,
    }  # fmt: skip
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in options.parts:
        found[part] = parts[part]()
        free()
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
