"""What a decode step's time goes to: kernel by kernel, from replays of its CUDA graph.

    python -m tests.gpu.bench.profile_decode qwen06b --shapes 8x576 32x576 [--kv-cache-dtype fp8] [--ranks 2]
        [--json FILE]

A shape is rows x context. Kernels overlap under programmatic dependent launch, so beside how long a kernel is there
(which includes its waiting) stands how much it moved the end of the step: the time from the end of all before it to its
own; these add up to the step. With ``--ranks`` it is the step of one rank, which waits for no other: what it exchanges
goes to its own memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from pagebus.actors.executor.device.device import KV_DTYPES
from tests.gpu.bench.decode_step import DecodeStep, replay_ms

REPLAYS = 8


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[dict[str, Any]]:
    """Every kernel of some replays in order: name with its grid, start and end in microseconds."""
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [
        {
            "name": f"{event['name'].removeprefix('void ')[:60]} {event.get('args', {}).get('grid', '')}",
            "start": event["ts"],
            "end": event["ts"] + event["dur"],
        }
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(kernels, key=lambda kernel: kernel["start"])


def table_of(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kernel and per step: how many, microseconds there in the mean, microseconds that moved the end."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    reached = kernels[0]["start"]
    for kernel in kernels:
        row = rows[kernel["name"]]
        row[0] += 1
        row[1] += kernel["end"] - kernel["start"]
        row[2] += max(0.0, kernel["end"] - reached)
        reached = max(reached, kernel["end"])
    table = [
        {"kernel": name, "per_step": count / REPLAYS, "there_us": there / count, "moved_us": moved / REPLAYS,
         "moved_us_each": moved / count}
        for name, (count, there, moved) in rows.items()
    ]  # fmt: skip
    return sorted(table, key=lambda row: -row["moved_us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="one of SHAPES, or a folder with a config.json")
    parser.add_argument("--shapes", nargs="+", default=["8x576", "32x576", "64x576"])
    parser.add_argument("--kv-cache-dtype", default="bfloat16", choices=["bfloat16", *KV_DTYPES])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), help="of random weights")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    num_tokens = max(rows * (context + 16) for rows, context in shapes)
    step = DecodeStep(
        arguments.model, max(rows for rows, _ in shapes), max(context for _, context in shapes), num_tokens,
        KV_DTYPES.get(arguments.kv_cache_dtype, torch.bfloat16), arguments.ranks, arguments.quantization,
    )  # fmt: skip
    report = []
    for rows, context in shapes:
        graph = step.capture(rows, context)
        figures: dict[str, Any] = {"rows": rows, "context": context, "step_ms": replay_ms(graph.replay)}
        print(f"\n{arguments.model} {rows} rows of {context}: {figures['step_ms']:.3f} ms", flush=True)
        figures["kernels"] = table_of(kernels_of(graph))
        for row in figures["kernels"]:
            print(
                f"  {row['moved_us']:9.1f} us  {row['per_step']:6.1f} x {row['moved_us_each']:7.2f}"
                f"  (there {row['there_us']:7.2f})  {row['kernel']}"
            )
        report.append(figures)
    if arguments.json:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": arguments.model}
        arguments.json.write_text(json.dumps({**device, "shapes": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
