"""How fast blocks move between two processes, each with a GPU, or both on one: 512 blocks of 2 MiB.

    python -m tests.gpu.moves.bench_pulls [--blocks 512] [--mib 2] [--repeats 7]

Over CUDA's handles of memory and over TCP on this host; in scattered places, in runs of 16 neighbours, and all in one.
Prints one line of JSON: milliseconds (the median) and GB/s of each, and what the first pull took, which opens the
memory. Every pull's bytes are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace

from pagebus.actors.executor.moves.carriers.source import Source
from tests.gpu.moves.device_source import DeviceCache, DeviceSource
from tests.helpers.engine_driver import ints

RUN = 16


def orders(num_blocks: int, count: int) -> dict[str, tuple[list[int], list[int]]]:
    """(sources, targets) of each kind."""
    rng = random.Random(0)

    def in_runs() -> list[int]:
        starts = rng.sample(range(0, num_blocks, RUN), count // RUN)
        return [start + each for start in starts for each in range(RUN)]

    scattered = rng.sample(range(num_blocks), count), rng.sample(range(num_blocks), count)
    return {"scattered": scattered, "runs_of_16": (in_runs(), in_runs()), "one_run": (list(range(count)),) * 2}


def seconds(pulled: Source, own: DeviceCache, sources: list[int], targets: list[int]) -> float:
    own.tensor.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    pulled.copy(ints(sources), ints(targets), lambda: False)
    took = time.perf_counter() - began
    assert own.holds(sources, targets)
    return took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--mib", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    num_blocks, block_bytes = 4 * asked.blocks, asked.mib << 20
    own = DeviceCache(num_blocks, block_bytes, torch.device("cuda", 0))
    gpu = 1 if torch.cuda.device_count() > 1 else 0
    told: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "from": gpu, "to": 0, "blocks": asked.blocks}
    told["mib"] = asked.mib
    with DeviceSource(gpu, num_blocks, block_bytes) as process:
        ways = {"cuda_ipc": process.address, "network": replace(process.address, host="elsewhere")}
        for way, address in ways.items():
            pulled = Source(address, own.blocks, network=way == "network")
            told[f"{way}_first_ms"] = round(seconds(pulled, own, [0], [0]) * 1e3, 2)
            for kind, (sources, targets) in orders(num_blocks, asked.blocks).items():
                took = median(seconds(pulled, own, sources, targets) for _ in range(asked.repeats))
                told[f"{way}_{kind}_ms"] = round(took * 1e3, 2)
                told[f"{way}_{kind}_gb_per_s"] = round(asked.blocks * block_bytes / took / 1e9, 1)
            pulled.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
