"""How fast blocks move between two processes, each with a GPU, or both on one: 512 blocks of 2 MiB.

    python -m tests.gpu.moves.bench_pulls [--blocks 512] [--mib 2] [--repeats 7]

Over CUDA's handles of memory and over TCP on this host; in scattered places, in runs of 16 neighbours, and all in one.
Then out of the other's host tier: page-locked here, as the own host tier is, or read through buffers; and a swap-in
from the own one. Prints one line of JSON: milliseconds (the median) and GB/s of each, what the first pull took, which
opens the memory, and how fast host memory is page-locked, alone and shared. Every pull's bytes are compared.
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

from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.swap import make_copies
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.shared_file import SharedFile
from pagebus.actors.executor.moves.carriers.source import Source
from pagebus.bus.messages import StepPlan
from tests.gpu.moves.device_source import FIRST_HOST, DeviceCache, DeviceSource, host_memory
from tests.helpers.engine_driver import ints
from tests.helpers.waiting import LIMIT_S

RUN = 16


def orders(num_blocks: int, count: int) -> dict[str, tuple[list[int], list[int]]]:
    """(sources, targets) of each kind."""
    rng = random.Random(0)

    def in_runs() -> list[int]:
        starts = rng.sample(range(0, num_blocks, RUN), count // RUN)
        return [start + each for start in starts for each in range(RUN)]

    scattered = rng.sample(range(num_blocks), count), rng.sample(range(num_blocks), count)
    return {"scattered": scattered, "runs_of_16": (in_runs(), in_runs()), "one_run": (list(range(count)),) * 2}


def seconds(pulled: Source, own: DeviceCache, sources: list[int], targets: list[int], *, hosts: bool = False) -> float:
    own.tensor.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    pulled.copy(ints(sources), ints(targets), lambda: False, hosts=hosts)
    took = time.perf_counter() - began
    assert own.holds([FIRST_HOST + each for each in sources] if hosts else sources, targets)
    return took


def swap_in_seconds(own: DeviceCache, memory: HostMemory, sources: list[int], targets: list[int]) -> float:
    """As a plan orders it of the own host tier."""
    copies = make_copies(own.tensor, memory)
    plan = StepPlan(
        step=1, planned_s=0.0, num_decodes=0, swap_in_hosts=ints(sources), swap_in_blocks=ints(targets)
    )  # fmt: skip
    own.tensor.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    copied = copies.apply(plan)
    assert copied is not None
    copied.synchronize()
    took = time.perf_counter() - began
    assert own.holds([FIRST_HOST + each for each in sources], targets)
    return took


def locking_seconds(num_hosts: int, block_bytes: int, device: torch.device, *, shared: bool) -> float:
    """Of taking so much memory and page-locking it."""
    began = time.perf_counter()
    memory = HostMemory(num_hosts, block_bytes, device, shared=shared)
    memory.lock_rest()
    assert memory.wait(num_hosts, LIMIT_S)
    took = time.perf_counter() - began
    memory.close()
    return took


def measure_hosts(address: Address, own: DeviceCache, asked: argparse.Namespace) -> dict[str, float]:
    """Of the other's host tier, and of the own one."""
    block_bytes, device, told = own.blocks.block_bytes, own.tensor.device, dict[str, float]()
    num_hosts, size = 2 * asked.blocks, asked.blocks * own.blocks.block_bytes
    for shared in (False, True):
        took = locking_seconds(num_hosts, block_bytes, device, shared=shared)
        told[f"locking_{'shared' if shared else 'private'}_s_per_gib"] = round(
            took / (num_hosts * block_bytes) * 2**30, 3
        )
    locked, through_buffers = (Source(address, own.blocks, network=False) for _ in range(2))
    through_buffers._carriers[True] = [each for each in locked._carriers[True] if isinstance(each, SharedFile)]
    every = list(range(asked.blocks))
    began = time.perf_counter()
    locked.prepare(ints(every), hosts=True)
    told["host_locking_for_this_process_ms"] = round((time.perf_counter() - began) * 1e3, 2)
    ways = {"host_locked": locked, "host_through_buffers": through_buffers}
    for kind, (sources, targets) in orders(num_hosts, asked.blocks).items():
        for way, pulled in ways.items():
            seconds(pulled, own, sources, targets, hosts=True)
            took = median(seconds(pulled, own, sources, targets, hosts=True) for _ in range(asked.repeats))
            told[f"{way}_{kind}_ms"] = round(took * 1e3, 2)
            told[f"{way}_{kind}_gb_per_s"] = round(size / took / 1e9, 1)
    for shared in (False, True):
        memory = host_memory(num_hosts, block_bytes, device, shared=shared)
        for kind, (sources, targets) in orders(num_hosts, asked.blocks).items():
            took = median(swap_in_seconds(own, memory, sources, targets) for _ in range(asked.repeats))
            told[f"swap_in_{'shared' if shared else 'private'}_{kind}_ms"] = round(took * 1e3, 2)
        memory.close()
    for pulled in ways.values():
        pulled.close()
    return told


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
    with DeviceSource(gpu, num_blocks, block_bytes, 2 * asked.blocks) as process:
        ways = {"cuda_ipc": process.address, "network": replace(process.address, host="elsewhere")}
        for way, address in ways.items():
            pulled = Source(address, own.blocks, network=way == "network")
            told[f"{way}_first_ms"] = round(seconds(pulled, own, [0], [0]) * 1e3, 2)
            for kind, (sources, targets) in orders(num_blocks, asked.blocks).items():
                took = median(seconds(pulled, own, sources, targets) for _ in range(asked.repeats))
                told[f"{way}_{kind}_ms"] = round(took * 1e3, 2)
                told[f"{way}_{kind}_gb_per_s"] = round(asked.blocks * block_bytes / took / 1e9, 1)
            pulled.close()
        told |= measure_hosts(process.address, own, asked)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
