"""What a restart costs a long prompt, with blocks on the disk and without: `python -m tests.system.cache.bench_disk`.

Real actors in one process, on a CPU, with the shipped model, over the in-memory bus. Each prompt of ``--tokens`` tokens
is asked in a first life, then in a second one. Prints the seconds to the first token: medians of ``--prompts`` prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from pagebus.actors.model.config import resolve_model
from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.helpers.waiting import eventually
from tests.system.harness import System, running


async def life(
    folder: Path, asked: list[list[int]], options: dict[str, object], writes: int
) -> tuple[list[float], int]:
    """Seconds to the first token of each prompt, asked one after another, and the blocks that were read."""
    server = MemoryServer()
    async with running(folder, lambda: MemoryBus(server), **options) as system:
        took = []
        for prompt in asked:
            began_s = time.perf_counter()
            await system.generate([prompt], max_tokens=1)
            took.append(time.perf_counter() - began_s)
        await eventually(lambda: enough(system, writes))
        return took, tier(system).num_in


def tier(system: System):
    (replica,) = system.scheduler.core.replicas.values()
    return replica.disk_tier


async def enough(system: System, writes: int) -> bool:
    return tier(system).num_out >= writes


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=7)
    arguments = parser.parse_args()
    model, rng = resolve_model(Settings()), random.Random(0)
    asked = [[rng.randrange(300, 4000) for _ in range(arguments.tokens)] for _ in range(arguments.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, object] = {"disk_cache_dir": f"{folder}/cache", "disk_cache_gib": 4.0, "swap_space": 1.0}
        blocks = arguments.tokens // 16 * arguments.prompts
        first, _ = await life(model, asked, options, blocks)
        second, read = await life(model, asked, options, 0)
    for name, took in (("computed", first), ("after a restart", second)):
        print(f"{name}: {statistics.median(took) * 1e3:.0f} ms ({min(took) * 1e3:.0f} to {max(took) * 1e3:.0f})")
    print(f"{read} of {blocks} blocks were read")


if __name__ == "__main__":
    asyncio.run(main())
