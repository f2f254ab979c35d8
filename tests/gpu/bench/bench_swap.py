"""What the host tier does for llama8b shapes: copy rates, undisturbed decodes, return of preempted sequences, TTFT.

    python -m tests.gpu.bench.bench_swap [--model llama8b] [--swap-space 16] [--json FILE]

Random weights. Rates: pinned copies of 1 GiB in one piece (the ceiling), and blocks one by one as plans copy them.
Decodes: batch 32, while 0 or more blocks per step go each way. Return: a job of 8192 tokens gives way to an interactive
request and comes back, by swap and by recompute; the time is from that request's last token to the job's next one.
TTFT: a prompt of 16384 tokens cold, then with all but 64 of them on the device, then in the host tier.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor.memory.swap import _seconds
from pagebus.bus.messages import StepPlan
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver, HandScheduler, ints

NUM_BLOCKS = 6144
DEPTH = 2
BATCH, PROMPT_TOKENS, DECODE_STEPS, WARM_STEPS = 32, 512, 160, 16
LONG_TOKENS, SHARED_TOKENS, TAIL_TOKENS = 8192, 16384, 64
GIB = 1 << 30


def tokens(driver: Driver, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(driver.info.vocab_size) for _ in range(count)]


# -- rates ------------------------------------------------------------------------------------------------------------


def ceiling() -> dict[str, float]:
    """GB/s of one pinned copy of 1 GiB, each way, the best of five."""
    device, host = torch.empty(GIB, dtype=torch.uint8, device="cuda"), torch.empty(GIB, dtype=torch.uint8).pin_memory()
    rates = {}
    for name, target, source in (("out", host, device), ("in", device, host)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rates[name] = GIB / min(seconds) / 1e9
    return rates


def block_rates(driver: Driver) -> dict[str, Any]:
    """GB/s of 512 blocks in random places, by the clock from the call to the last byte; the host's share of it."""
    copies, rng = driver.engine._loaded.copies, random.Random(0)
    rates: dict[str, Any] = {"block_mib": copies.memory.block_bytes / 2**20}
    for way in ("out", "in"):
        seconds, calls = [], []
        for _ in range(5):
            blocks = ints(rng.sample(range(driver.info.num_blocks), 512))
            hosts = ints(rng.sample(range(driver.engine.num_host_blocks), 512))
            names = ("swap_out_blocks", "swap_out_hosts") if way == "out" else ("swap_in_blocks", "swap_in_hosts")
            plan = StepPlan(step=0, planned_s=0.0, num_decodes=0, **dict(zip(names, (blocks, hosts), strict=True)))
            torch.cuda.synchronize()
            seconds.append(_seconds(copies, plan))
            began = time.perf_counter()
            copies.apply(plan)
            calls.append(time.perf_counter() - began)
            torch.cuda.synchronize()
        rates[way] = 512 * copies.memory.block_bytes / min(seconds) / 1e9
        rates[f"{way}_host_us_per_block"] = min(calls) / 512 * 1e6
    return rates


# -- decodes beside copies --------------------------------------------------------------------------------------------


def decode_steps(driver: Driver, blocks_each_way: int) -> dict[str, float]:
    """Step time of a batch of decodes while so many blocks per step go out and as many come in."""
    driver.epoch += 1
    info, rng = driver.info, random.Random(1)
    spare = 1024
    scheduler = HandScheduler(info.num_blocks - spare, info.block_size, info.max_num_seqs, info.max_num_batched_tokens)
    for i in range(BATCH):
        scheduler.add(tokens(driver, PROMPT_TOKENS, i), DECODE_STEPS + 1)
    plans = []
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    first = next(i for i, plan in enumerate(plans) if plan.num_decodes == BATCH) + WARM_STEPS
    device = range(info.num_blocks - spare, info.num_blocks)
    times, copied = [], []
    for number, plan in enumerate(plans):
        if number >= first and blocks_each_way:
            out, back = rng.sample(device, blocks_each_way), rng.sample(device, blocks_each_way)
            hosts = rng.sample(range(driver.engine.num_host_blocks), 2 * blocks_each_way)
            plan = structs.replace(
                plan,
                swap_out_blocks=ints(out), swap_out_hosts=ints(hosts[:blocks_each_way]),
                swap_in_hosts=ints(hosts[blocks_each_way:]), swap_in_blocks=ints(back),
            )  # fmt: skip
        if number >= DEPTH:
            result = driver.result()
            times.append(result.done_s)
            copied.append(result.step - result.copied_step)
        driver.engine.submit(plan, driver.epoch)
    for _ in range(DEPTH):
        driver.result()
    driver.synchronize()
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times[first:])]
    step_ms = statistics.median(gaps)
    rate = 2 * blocks_each_way * info.block_bytes / (statistics.mean(gaps) / 1e3) / 1e9
    return {
        "blocks_each_way": blocks_each_way,
        "step_ms": step_ms,
        "mean_ms": statistics.mean(gaps),
        "p99_ms": sorted(gaps)[int(len(gaps) * 0.99)],
        "asked_gb_per_s": rate,
        "steps_behind": copied[-1],
    }


# -- return of a preempted sequence -----------------------------------------------------------------------------------


def return_time(driver: Driver, mode: str, seed: int) -> dict[str, float]:
    """Seconds from the last token of the request that displaced a long job to the job's next token."""
    num_blocks = (LONG_TOKENS + LONG_TOKENS // 2) // driver.info.block_size
    core = CoreDriver(
        driver, depth=DEPTH, preemption_mode=mode, enable_prefix_caching=False, limits={"num_blocks": num_blocks}
    )
    job = core.send("job", tokens(driver, LONG_TOKENS, seed), 64, is_job=True)
    core.run(until=lambda: len(job.tokens) >= 8)
    before = core.send("interactive", tokens(driver, LONG_TOKENS, seed + 1), 32)
    core.run(until=lambda: before.ended)
    had = len(job.tokens)
    core.run(until=lambda: len(job.tokens) > had)
    seconds = job.times_s[had] - before.times_s[-1]
    core.run()
    assert core.replica.counts.num_preemptions == 1, core.replica.counts.num_preemptions
    assert (core.replica.host_tier.num_in > 0) == (mode == "swap")
    return {"seconds": seconds, "blocks_in": core.replica.host_tier.num_in, "tokens": LONG_TOKENS + had}


# -- time to first token ----------------------------------------------------------------------------------------------


def ttft(driver: Driver, seed: int) -> dict[str, float]:
    """Of three requests with a long prefix in common: cold, on the device, in the host tier."""
    shared = tokens(driver, SHARED_TOKENS - TAIL_TOKENS, seed)
    num_blocks = 9 * SHARED_TOKENS // (4 * driver.info.block_size)
    core = CoreDriver(driver, depth=DEPTH, preemption_mode="auto", limits={"num_blocks": num_blocks})

    def ask(name: str, number: int) -> float:
        answer = core.send(name, shared + tokens(driver, TAIL_TOKENS, seed + number), 4)
        core.run()
        return answer.first_token_s

    figures = {"cold_s": ask("cold", 1), "device_s": ask("device", 2)}
    for number in range(3):
        core.send(f"filler {number}", tokens(driver, SHARED_TOKENS - TAIL_TOKENS, seed + 100 + number), 4)
        core.run()
    driver.synchronize()
    hits = core.replica.host_tier.num_hits
    figures["host_s"] = ask("host", 3)
    figures["host_hit_tokens"] = core.replica.host_tier.num_hits - hits
    figures["demoted_blocks"] = core.replica.host_tier.num_out
    figures["device_of_cold"] = figures["device_s"] / figures["cold_s"]
    figures["host_of_cold"] = figures["host_s"] / figures["cold_s"]
    return figures


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama8b", choices=sorted(SHAPES))
    parser.add_argument("--swap-space", type=float, default=16.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rates = {"ceiling": ceiling()}
    torch.cuda.empty_cache()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as parent:
        driver = Driver(
            write_model_folder(arguments.model, Path(parent)), device="cuda", load_format="dummy", max_model_len=32768,
            max_num_seqs=64, num_gpu_blocks_override=NUM_BLOCKS, swap_space=arguments.swap_space, pipeline_depth=DEPTH,
        )  # fmt: skip
    report: dict[str, Any] = {
        "model": arguments.model, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "ready_s": time.perf_counter() - began, "host_blocks_when_ready": driver.info.num_host_blocks,
        "copy_gb_per_s_told": driver.info.copy_bytes_per_s / 1e9,
        "prefill_tokens_per_s_told": driver.info.prefill_tokens_per_s,
    }  # fmt: skip
    memory = driver.engine._loaded.copies.memory
    memory.wait(memory.num_blocks, timeout_s=180)
    driver.synchronize()
    report["locked_s"], report["host_blocks"] = time.perf_counter() - began, driver.engine.num_host_blocks
    report["rates_gb_per_s"] = rates | {"blocks": block_rates(driver)}
    report["decode"] = [decode_steps(driver, count) for count in (0, 16, 32, 64, 0)]
    returns = {mode: [return_time(driver, mode, seed) for seed in range(0, 60, 10)] for mode in ("swap", "recompute")}
    report["return"] = {mode: median_of(rows[1:]) for mode, rows in returns.items()}
    report["return"]["recompute_of_swap"] = (
        report["return"]["recompute"]["seconds"] / report["return"]["swap"]["seconds"]
    )
    report["ttft"] = median_of([ttft(driver, seed) for seed in range(1000, 5000, 1000)][1:])
    driver.close()
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    blocks, best = report["rates_gb_per_s"]["blocks"], rates["ceiling"]
    plain = report["decode"][0]["step_ms"]
    print(f"\nblocks out {blocks['out']:.1f} of {best['out']:.1f} GB/s, in {blocks['in']:.1f} of {best['in']:.1f} GB/s")
    for row in report["decode"]:
        print(
            f"decode batch {BATCH}, {row['blocks_each_way']:3d} blocks each way per step ({row['asked_gb_per_s']:5.1f} "
            f"GB/s): {row['step_ms']:.3f} ms, {row['step_ms'] / plain - 1:+.1%}"
        )
    print(f"return: recompute / swap = {report['return']['recompute_of_swap']:.1f}")
    print(f"TTFT of cold: device {report['ttft']['device_of_cold']:.3f}, host {report['ttft']['host_of_cold']:.3f}")


if __name__ == "__main__":
    main()
