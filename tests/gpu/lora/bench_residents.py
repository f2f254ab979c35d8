"""Times adapters that are not on the device: `python -m tests.gpu.lora.bench_residents copies|reading|first|many
[MODEL] ...`.

`copies`: how long one takes from host memory into its blocks, and the host for that, without an engine. `reading`: how
many come from files into host memory in a second, by threads beside one that launches, into memory that is new or was
used before; and how long the launches take that a step may have, alone and beside. `first`: first
tokens of single requests whose adapter is on the device, in host memory, or in files that were just written; the cache
has blocks for two adapters beside the sequence. `many`: throughput with adapters that requests name as often as Zipf's
law says, of those that are registered; each run has the same requests but for the adapters that they name. All files
are read before, once. Only those that some request names are written: nobody has a list of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from pagebus.actors.bench.driver.deployment import Deployment, as_served, deployed, scratch
from pagebus.actors.bench.driver.loras import write_adapters
from pagebus.actors.bench.driver.requests import make_prompts, make_requests
from pagebus.actors.bench.measures.watch import Watch
from pagebus.actors.executor.actor import SWITCH_INTERVAL_S
from pagebus.actors.executor.adapters.pinned import PinnedMemory
from pagebus.actors.executor.adapters.places import Places
from pagebus.actors.executor.adapters.reading import Read, reader
from pagebus.actors.executor.adapters.residents import READERS
from pagebus.actors.executor.loading.loading import choose_ops
from pagebus.actors.executor.memory.block_loads import Loads
from pagebus.actors.executor.memory.host_memory import HostMemory, lock_pages
from pagebus.actors.executor.memory.kv_cache import kv_block_bytes
from pagebus.actors.executor.memory.swap import make_copies
from pagebus.actors.executor.models import build_model
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.model.config import ModelConfig, resolve_model
from pagebus.actors.model.lora.projections import projections
from pagebus.actors.settings import Settings
from pagebus.actors.simulator.recording.trace import make_trace
from pagebus.bus.messages import AdapterSource, StepPlan

PROMPT, OUTPUT = 512, 128
FIRST_OUTPUT = 8
FIRST_PROMPT = 16
MAX_MODEL_LEN = 1024
LAUNCHES, PRODUCTS = 300, 8
"""Of a step of `reading`."""
PLACES, WRITTEN = 2, 6
"""Of `first`: adapters that take turns find their blocks taken by others."""


def settings_of(options: argparse.Namespace, places: int, held: int, **more: Any) -> Settings:
    return Settings(
        model=options.model, device=options.device, enable_lora=True, max_loras=places, max_lora_rank=options.rank,
        max_cpu_loras=held, spec_method="none", enable_prefix_caching=False, max_model_len=MAX_MODEL_LEN, **more,
    )  # fmt: skip


def blocks_for(settings: Settings, config: ModelConfig, adapters: int) -> int:
    """For one sequence and so many adapters of the largest rank."""
    each = sum(
        projection.copies * (len(projection.modules) * projection.inputs + sum(projection.widths))
        for projection in projections(config)
    )
    block = kv_block_bytes(config, settings.block_size, torch.bfloat16)
    return MAX_MODEL_LEN // settings.block_size + adapters * -(-2 * settings.max_lora_rank * each // block)


def places_of(options: argparse.Namespace, settings: Settings) -> tuple[Places, Read, int]:
    """Of a network without weights: its places, what reads adapters, and the bytes of a block."""
    config, device = ModelConfig.load(Path(settings.model)), torch.device(options.device)
    network = build_model(config, device, torch.bfloat16, choose_ops(settings, device), MAX_MODEL_LEN, torch.bfloat16)
    assert isinstance(network, Decoder)
    block_bytes = kv_block_bytes(config, settings.block_size, torch.bfloat16)
    places = Places(network, WRITTEN, options.rank, block_bytes)
    return places, reader(config, options.rank, torch.bfloat16), block_bytes


def copies(options: argparse.Namespace) -> None:
    """Of an engine's parts: its network without weights, a cache, and what copies to it."""
    with scratch() as folder, torch.inference_mode():
        settings, device = as_served(settings_of(options, PLACES, WRITTEN), folder), torch.device(options.device)
        (source,) = adapters_in(folder, settings, 1, options.rank)
        places, read, block_bytes = places_of(options, settings)
        began = time.perf_counter()
        image = places.image(read(source))
        read_s, count = time.perf_counter() - began, places.num_blocks(image)
        cache = torch.zeros(2 * count, block_bytes, dtype=torch.uint8, device=device)
        places.use(cache)
        mover, host, whole = make_copies(cache, HostMemory(0, block_bytes, device)), [], []
        for turn in range(options.requests):
            blocks = np.arange(count, dtype=np.int32) + turn % 2 * count
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            loads = Loads(places.place(turn % WRITTEN, image, blocks), blocks)
            copied = mover.apply(StepPlan(step=turn + 1, planned_s=0.0, num_decodes=0), loads)
            host.append(1e3 * (time.perf_counter() - began))
            if copied is not None:
                copied.synchronize()
            whole.append(1e3 * (time.perf_counter() - began))
        print(f"{2 * image.length / 2**20:.1f} MiB in {count} blocks of {block_bytes} bytes; read in {read_s:.3f} s")
        for name, found in (("the host", host), ("until it is there", whole)):
            print(f"{name}: {statistics.median(found):.2f} ms ({min(found):.2f} to {max(found):.2f})", flush=True)


class Launches:
    """A thread that steps: products that take an H200 about 12 ms, and as many launches as a step has without a graph,
    with Python between them."""

    def __init__(self, device: str) -> None:
        self._numbers, self._stop = torch.zeros(64, device=device), threading.Event()
        self._large = torch.zeros(*[8192 if device == "cuda" else 8] * 2, dtype=torch.bfloat16, device=device)
        self._thread = threading.Thread(target=self._run)
        self._step_s: list[float] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            for _ in range(PRODUCTS):
                torch.matmul(self._large, self._large)
            for _ in range(LAUNCHES):
                self._numbers.add_(1.0)
            self._numbers.sum().item()
            self._step_s.append(time.perf_counter() - began)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def told(self) -> str:
        """How long they took."""
        found = np.array(self._step_s) * 1e3
        median, most = np.percentile(found, (50, 99))
        return f"steps of {median:.2f} ms, {most:.2f} at the 99th percentile, {found.max():.2f} at most"


def locking(device: torch.device) -> None:
    """How long the host waits for memory from which the device copies, 256 MiB of each kind, and launches for that."""
    ways: dict[str, Callable[[int], object]] = {
        "ours": PinnedMemory(partial(lock_pages, device=device)).take,
        "torch's": lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    }
    for name, take in ways.items():
        for size in (2, 16, 64):
            found, kept = [], []
            with Launches(device.type) as launches:
                for _ in range(256 // size):
                    began = time.perf_counter()
                    kept.append(take(size << 20))
                    found.append(1e3 * (time.perf_counter() - began))
            print(f"{name}, {size} MiB: {statistics.median(found):.2f} ms beside {launches.told()}", flush=True)


def reading(options: argparse.Namespace) -> None:
    """Without an engine."""
    with scratch() as folder:
        settings = as_served(settings_of(options, PLACES, WRITTEN), folder)
        adapters = adapters_in(folder, settings, options.adapters, options.rank)
        places, read, _ = places_of(options, settings)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        began = time.perf_counter()
        places.image(read(adapters[0]))
        print(f"the first of its kind: {1e3 * (time.perf_counter() - began):.0f} ms")
        with Launches(options.device) as launches:
            time.sleep(1.0)
        print(f"alone: {launches.told()}", flush=True)
        if options.device == "cuda":
            locking(torch.device(options.device))
        for memory, count in (("new", READERS), *(("used before", count) for count in (1, 2, 4, 8))):
            with ThreadPoolExecutor(count) as pool, Launches(options.device) as launches:
                began = time.perf_counter()
                kept = list(pool.map(lambda source: places.image(read(source)), adapters))
                rate = len(kept) / (time.perf_counter() - began)
            print(f"{count} threads, memory {memory}: {rate:.1f} a second beside {launches.told()}", flush=True)
            del kept


def adapters_in(folder: Path, settings: Settings, count: int, rank: int) -> Sequence[AdapterSource]:
    begun = time.monotonic()
    config = ModelConfig.load(resolve_model(settings, weights=False))
    found = write_adapters(folder / "loras", config, count, rank)
    print(f"{count} adapters of rank {rank} registered in {time.monotonic() - begun:.1f} s", flush=True)
    return found


def _tell_start(deployment: Deployment) -> None:
    print(f"ready after {deployment.ready_s - deployment.started_s:.1f} s", flush=True)


async def first_tokens(options: argparse.Namespace) -> None:
    """Medians of single requests."""
    with scratch() as folder:
        settings = as_served(settings_of(options, PLACES, WRITTEN, max_num_seqs=4, max_num_batched_tokens=1024), folder)
        config = ModelConfig.load(resolve_model(settings, weights=False))
        settings = settings.replace(num_gpu_blocks_override=blocks_for(settings, config, PLACES))
        adapters = adapters_in(folder, settings, WRITTEN, options.rank)
        async with deployed(settings, folder / "serve.log") as deployment:
            _tell_start(deployment)
            watch, trace, asked = Watch(deployment), make_trace([PROMPT], FIRST_OUTPUT), [0]

            async def first(adapter: AdapterSource | None) -> float:
                """Milliseconds from a request to its first token."""
                asked[0] += 1
                prompts = make_prompts(trace, deployment.vocab_size, (asked[0],))
                run = await watch.run(make_requests(trace, prompts, f"first-{asked[0]}", 0.0, (adapter,)))
                return float(run.token_s[run.token_indexes == 0][0] - run.submitted_s) * 1e3

            for _ in range(10):
                await first(adapters[0])
            read = [await first(each) for each in adapters[1:]]
            print(
                f"in files: {statistics.median(read):.1f} ms ({', '.join(f'{each:.1f}' for each in read)})", flush=True
            )
            for kind, turns in (
                ("the model alone", [None]), ("on the device", [adapters[0]]), ("in host memory", list(adapters)),
                ("on the device", [adapters[0]]), ("in host memory", list(adapters)),
            ):  # fmt: skip
                await first(turns[-1])
                found = [await first(turns[index % len(turns)]) for index in range(options.requests)]
                print(f"{kind}: {statistics.median(found):.2f} ms ({min(found):.2f} to {max(found):.2f})", flush=True)


async def throughput(options: argparse.Namespace) -> None:
    """Of requests that name registered adapters, in several runs."""
    places = options.places
    with scratch() as folder:
        settings = as_served(settings_of(options, places, max(places, options.adapters), max_num_seqs=256), folder)
        shares = 1 / np.arange(1, options.adapters + 1)
        draws = [
            np.random.default_rng(number).choice(options.adapters, options.requests, p=shares / shares.sum())
            for number in range(options.runs)
        ]
        named, places_of = np.unique(np.stack(draws), return_inverse=True)
        adapters = adapters_in(folder, settings, len(named), options.rank)
        trace = make_trace([PROMPT] * options.requests, OUTPUT)
        async with deployed(settings, folder / "serve.log") as deployment:
            _tell_start(deployment)
            watch = Watch(deployment)
            once = make_trace([FIRST_PROMPT] * len(adapters), 1)
            prompts = make_prompts(once, deployment.vocab_size, (options.runs,))
            run = await watch.run(make_requests(once, prompts, "read", 0.0, adapters))
            print(f"{len(adapters)} adapters read in {run.steps[-1].done_s - run.submitted_s:.1f} s", flush=True)
            for number, drawn in enumerate(places_of.reshape(options.runs, -1).tolist()):
                prompts = make_prompts(trace, deployment.vocab_size, (number,))
                asked = [adapters[index] for index in drawn]
                run = await watch.run(make_requests(trace, prompts, f"many-{number}", 0.0, asked))
                seconds = run.steps[-1].done_s - run.submitted_s
                first = (run.token_s[run.token_indexes == 0] - run.submitted_s) * 1e3
                steps = [step.decodes for step in run.steps]
                print(
                    f"{options.adapters} adapters, {places} places, run {number + 1}: {len(run.token_s) / seconds:.0f} "
                    f"output tokens/s in {seconds:.1f} s, {len(set(drawn))} named, {len(steps)} steps of "
                    f"{statistics.mean(steps):.0f} rows; first tokens {np.median(first):.0f} ms in the median, "
                    f"{first.max():.0f} at most",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["copies", "reading", "first", "many"])
    parser.add_argument("model", nargs="?", default="llama8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--adapters", type=int, default=64, help="registered, of `many`; read, of `reading`")
    parser.add_argument("--places", type=int, default=64, help="with sequences at a time, of `many`")
    parser.add_argument("--runs", type=int, default=2, help="of `many`")
    options = parser.parse_args()
    if options.what in ("copies", "reading"):
        (copies if options.what == "copies" else reading)(options)
        return
    asyncio.run(first_tokens(options) if options.what == "first" else throughput(options))


if __name__ == "__main__":
    main()
