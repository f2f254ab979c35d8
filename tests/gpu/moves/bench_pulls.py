"""How fast blocks move between two processes, each with a GPU, or both on one: 512 blocks of 2 MiB.

    python -m tests.gpu.moves.bench_pulls [--blocks 512] [--mib 2] [--repeats 7] [--hosts-only | --divided-only]

First of groups of ranks of other sizes: half of the heads of each block, and all of those of two ranks. Then out of the
other's host tier: page-locked here, as the own host tier is, or read through buffers; over CUDA's handles of memory and
over TCP on this host, in scattered places, in runs of 16 neighbours, and all in one; and a swap-in from the own host
tier. Prints lines of JSON: milliseconds (the median) and GB/s of each, what the first pull took, which
opens the memory, and how fast host memory is page-locked, private and shared. Every pull's bytes are compared.
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

from pagebus.actors.executor.memory.block_parts import HeadRows
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.swap import make_copies
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.shared_file import SharedFile
from pagebus.actors.executor.moves.divided import DividedSource
from pagebus.actors.executor.moves.group import Group
from pagebus.actors.executor.moves.source import Source
from pagebus.bus.messages import StepPlan
from tests.gpu.moves.device_source import FIRST_HOST, DeviceCache, DeviceSource, host_memory
from tests.helpers.engine_driver import ints
from tests.helpers.waiting import LIMIT_S

RUN = 16
GIB = 1 << 30


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


def tell(**figures: Any) -> None:
    """Print them at once: what follows may take too long."""
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def measure_devices(address: Address, own: DeviceCache, asked: argparse.Namespace) -> None:
    """Of the other's device."""
    ways = {"cuda_ipc": address, "network": replace(address, host="elsewhere")}
    for way, each in ways.items():
        pulled = Source(each, own.blocks, network=way == "network")
        tell(way=way, first_ms=seconds(pulled, own, [0], [0]) * 1e3)
        for kind, (sources, targets) in orders(own.blocks.num_blocks, asked.blocks).items():
            took = median(seconds(pulled, own, sources, targets) for _ in range(asked.repeats))
            tell(way=way, kind=kind, ms=took * 1e3, gb_per_s=asked.blocks * own.blocks.block_bytes / took / 1e9)
        pulled.close()


def measure_divided(address: Address, asked: argparse.Namespace, device: torch.device) -> None:
    """Of groups of other sizes: half of the heads of each block, and all of those of two ranks."""
    block_bytes, rows = asked.mib << 20, 1024
    size = block_bytes // rows // 8
    for count in (4, 16):
        own = DeviceCache(asked.blocks, rows * count * size, device)
        theirs = [replace(address, parts=(HeadRows(rows, size, first, 8),)) for first in range(0, count, 8)]
        group = Group(0, (replace(address, parts=(HeadRows(rows, size, 0, count),)),))
        lenders = group.lenders(replace(theirs[0], others=tuple(theirs[1:])))
        pulled = DividedSource(lenders, own.blocks, network=False)
        blocks, times = ints(list(range(asked.blocks))), []
        for _ in range(1 + asked.repeats):
            began = time.perf_counter()
            pulled.copy(blocks, blocks, lambda: False)
            times.append(time.perf_counter() - began)
        took = median(times[1:])
        tell(way=f"{count} of {8 * len(theirs)} heads", ms=took * 1e3, gb_per_s=own.tensor.nbytes / took / 1e9)
        pulled.close()


def measure_hosts(address: Address, own: DeviceCache, asked: argparse.Namespace) -> None:
    """Of the other's host tier."""
    num_hosts, size = 2 * asked.blocks, asked.blocks * own.blocks.block_bytes
    locked, through_buffers = (Source(address, own.blocks, network=False) for _ in range(2))
    through_buffers._carriers[True] = [each for each in locked._carriers[True] if isinstance(each, SharedFile)]
    began = time.perf_counter()
    locked.prepare(ints(list(range(num_hosts))), hosts=True)
    tell(way="locked here", locking_s_per_gib=(time.perf_counter() - began) / (2 * size) * GIB)
    ways = {"locked here": locked, "through buffers": through_buffers}
    for kind, (sources, targets) in orders(num_hosts, asked.blocks).items():
        for way, pulled in ways.items():
            seconds(pulled, own, sources, targets, hosts=True)
            took = median(seconds(pulled, own, sources, targets, hosts=True) for _ in range(asked.repeats))
            tell(way=way, kind=kind, ms=took * 1e3, gb_per_s=size / took / 1e9)
    for pulled in ways.values():
        pulled.close()


def measure_own(own: DeviceCache, asked: argparse.Namespace) -> None:
    """Of the own host tier, which others may read or not."""
    num_hosts, block_bytes, device = 2 * asked.blocks, own.blocks.block_bytes, own.tensor.device
    for shared in (False, True):
        took = locking_seconds(num_hosts, block_bytes, device, shared=shared)
        tell(way="own", shared=shared, taking_and_locking_s_per_gib=took / (num_hosts * block_bytes) * GIB)
        memory = host_memory(num_hosts, block_bytes, device, shared=shared)
        for kind, (sources, targets) in orders(num_hosts, asked.blocks).items():
            took = median(swap_in_seconds(own, memory, sources, targets) for _ in range(asked.repeats))
            tell(way="own", shared=shared, kind=kind, ms=took * 1e3, gb_per_s=asked.blocks * block_bytes / took / 1e9)
        memory.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--mib", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hosts-only", action="store_true")
    parser.add_argument("--divided-only", action="store_true")
    asked = parser.parse_args()
    num_blocks, block_bytes = 4 * asked.blocks, asked.mib << 20
    own = DeviceCache(num_blocks, block_bytes, torch.device("cuda", 0))
    gpu = 1 if torch.cuda.device_count() > 1 else 0
    tell(gpu=torch.cuda.get_device_name(), source=gpu, target=0, blocks=asked.blocks, mib=asked.mib)
    with DeviceSource(gpu, 1 if asked.hosts_only else num_blocks, block_bytes, 2 * asked.blocks) as process:
        if not asked.hosts_only:
            measure_divided(process.address, asked, own.tensor.device)
        if asked.divided_only:
            return
        measure_hosts(process.address, own, asked)
        if not asked.hosts_only:
            measure_devices(process.address, own, asked)
    measure_own(own, asked)


if __name__ == "__main__":
    main()
