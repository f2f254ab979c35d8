"""How fast blocks come from another process on CPUs: ``python -m tests.actors.executor.moves.bench_carriers``.

NIXL is tried with the links of UCX that are named, if it is installed. There are 64 blocks of 2 MiB.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["PAGEBUS_TEST_CACHE"] = f"64 {2 << 20}"  # for the other process, too

from msgspec.structs import replace

from pagebus.actors.executor.moves.nixl import package
from pagebus.actors.executor.moves.source import Source
from tests.actors.executor.moves import caches
from tests.actors.executor.moves.caches import LocalCache, OtherProcess
from tests.helpers.engine_driver import ints


def rates(way: str, rounds: int, joined: int) -> list[float]:
    """GB/s of pulls of all blocks, ``joined`` neighbours at a time; the first one, which opens the way, is left out."""
    kind, _, links = way.partition(":")
    if links:
        os.environ["UCX_TLS"] = links
    own = LocalCache()
    with OtherProcess(nixl=kind == "nixl") as process:
        address = process.address if kind == "host" else replace(process.address, host="elsewhere")
        source = Source(address, own.blocks, network=True)
        parts = [list(range(first, first + joined)) for first in range(0, caches.NUM_BLOCKS, joined)]
        blocks = ints([block for part in reversed(parts) for block in part])
        found = []
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            source.copy(blocks, blocks, lambda: False)
            found.append(len(blocks) * caches.BLOCK_BYTES / (time.perf_counter() - began_s) / 1e9)
        source.close()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="*", default=["host", "network", "nixl:tcp", "nixl:all"])
    parser.add_argument("--joined", type=int, default=1, help="neighbouring blocks")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    for way in asked.ways:
        if way.startswith("nixl") and not package.is_installed():
            print(f"{way}: NIXL is not installed")
            continue
        found = rates(way, asked.rounds, asked.joined)
        print(f"{way}: GB/s {' '.join(f'{rate:.2f}' for rate in sorted(found))}")


if __name__ == "__main__":
    main()
