"""One decode step of a dummy-weight model served over Redis, and how busy the GPU is.

    python -m tests.gpu.bench_serve llama8b qwen06b [--batches 1 32 256] [--json FILE]

Starts ``pagebus serve --load-format dummy`` (private redis-server, every actor a process), submits requests of 512
prompt tokens as token ids over the bus, and reads the executor's results stream beside the scheduler. A decode step is
the median time between two results that hold exactly one token of each of the batch's sequences. The busy share comes
from the executor's own counter, over whole requests (prefill and decode).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from actors.bench.shapes import SHAPES, write_model_folder
from bus.connect import open_bus
from bus.contract import START, Bus, EntryId
from bus.messages import GenerateRequest, SamplingParams, StepResult
from bus.private_redis import PrivateRedis
from bus.streams import Names

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
NAMES = Names("bench")
BUSY = "pagebus:executor_busy_seconds_total"


async def start_server(
    model: Path, bus_url: str, port: int, extra: list[str]
) -> tuple[asyncio.subprocess.Process, float]:
    """Start ``pagebus serve``; returns the process and the seconds until /health said 200."""
    command = [sys.executable, "-m", "actors.cli", "serve", str(model), "--load-format", "dummy", "--name", "bench"]
    command += ["--bus", bus_url, "--port", str(port), "--max-num-seqs", "256", "--max-model-len", "8192", *extra]
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command)
    while time.monotonic() - started < 240:
        if process.returncode is not None:
            raise SystemExit(f"serve ended with {process.returncode}")
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/health", None, 2)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            return process, time.monotonic() - started
    raise SystemExit("serve was not healthy after 240 s")


async def run_batch(
    bus: Bus, executor: str, batch: int, vocab_size: int, position: EntryId
) -> tuple[dict[str, float], EntryId]:
    """Submit ``batch`` requests at once and watch the results; returns figures and the stream position reached."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(
            request_id=f"bench-{batch}-{index}-{time.monotonic_ns()}",
            ingress="bench",
            sampling=params,
            prompt_token_ids=rng.integers(0, vocab_size, PROMPT_TOKENS, dtype=np.int32),
        )
        for index in range(batch)
    ]
    submitted = time.time()
    await bus.publish((NAMES.requests, request) for request in requests)
    stream = NAMES.results(executor)
    finished = 0
    done: list[tuple[float, int]] = []
    while finished < batch:
        for entry in await bus.read({stream: position}, count=1000, block_ms=1000):
            position = entry.id
            if isinstance(entry.message, StepResult):
                finished += int(np.count_nonzero(entry.message.ends))
                done.append((entry.message.done_s, len(entry.message.token_ids)))
    steps = [b - a for (a, _), (b, n) in itertools.pairwise(done) if n == batch]
    return {
        "batch": batch,
        "step_ms_p50": 1e3 * statistics.median(steps),
        "step_ms_p99": 1e3 * float(np.quantile(steps, 0.99)),
        "decode_steps": len(steps),
        "output_tokens_per_s": batch * OUTPUT_TOKENS / (done[-1][0] - submitted),
    }, position


async def busy_seconds(bus: Bus, executor: str) -> float:
    """The executor's counter of seconds in which the GPU worked."""
    (snapshot,) = await bus.get_state(f"metrics:executor:{executor}")
    text = json.dumps(snapshot)
    if BUSY.removesuffix("_total") not in text:
        raise SystemExit(f"no {BUSY} in {text[:300]}")
    return find_value(snapshot, BUSY)


def find_value(node: object, name: str) -> float:
    """The number under the metric ``name`` in a snapshot."""
    from actors.metrics import render

    for line in render([node], {}).splitlines():  # type: ignore[list-item]
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    raise KeyError(name)


async def busy_share(bus: Bus, executor: str, batch: int, vocab_size: int, position: EntryId) -> tuple[float, EntryId]:
    """Share of wall time the GPU works while ``batch`` sequences decode."""
    _, position = await run_batch(bus, executor, batch, vocab_size, position)
    await asyncio.sleep(2.5)  # the counter is published once a second
    before = await busy_seconds(bus, executor)
    started = time.monotonic()
    rounds = 3
    for _ in range(rounds):
        _, position = await run_batch(bus, executor, batch, vocab_size, position)
    wall = time.monotonic() - started
    await asyncio.sleep(2.5)
    return (await busy_seconds(bus, executor) - before) / wall, position


async def bench(name: str, batches: list[int], extra: list[str]) -> dict[str, object]:
    vocab_size = int(SHAPES[name]["vocab_size"])  # type: ignore[call-overload]
    with tempfile.TemporaryDirectory() as folder:
        redis = PrivateRedis(Path(folder) / "redis")
        url = await redis.start()
        server, ready_s = await start_server(write_model_folder(name, Path(folder)), url, 8123, extra)
        bus = open_bus(url, "bench")
        await bus.connect()
        try:
            (executor,) = [lease.name for lease in await bus.leases("executor")]
            position = START
            await run_batch(bus, executor, 2, vocab_size, position)
            position = await bus.last_id(NAMES.results(executor))
            rows = []
            for batch in batches:
                figures, position = await run_batch(bus, executor, batch, vocab_size, position)
                figures["gpu_busy_share"], position = await busy_share(bus, executor, batch, vocab_size, position)
                rows.append(figures)
                print(name, json.dumps(figures), flush=True)
        finally:
            await bus.close()
            server.send_signal(signal.SIGTERM)
            await asyncio.wait_for(server.wait(), 60)
            await redis.stop()
    return {"model": name, "ready_s": ready_s, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = [asyncio.run(bench(name, args.batches, extra)) for name in args.models]
    for result in results:
        print(f"{result['model']}: ready after {result['ready_s']:.1f} s")
        for row in result["rows"]:  # type: ignore[attr-defined]
            print(
                f"  batch {row['batch']:4d}  step {row['step_ms_p50']:7.3f} ms (p99 {row['step_ms_p99']:7.3f})"
                f"  GPU busy {row['gpu_busy_share']:6.1%}  {row['output_tokens_per_s']:9.0f} output tokens/s"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
