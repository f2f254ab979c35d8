"""What a restart costs a long prompt on a GPU, with its blocks on the disk: served over Redis, asked over HTTP.

    python -m tests.gpu.disk.bench_disk llama8b [--tokens 15000] [--prompts 3] [--disk FOLDER] [options of serve...]

Starts ``pagebus serve`` with dummy weights and ``--disk-cache-dir`` three times, and asks the same prompts each time,
one after another: in the first life twice (computed, and from the GPU's cache), in the second with the files in the
system's page cache, in the third with the files on the disk alone. Prints the milliseconds until the answer of one
token, what was read, and how fast: the bytes over the time that this took more than from the GPU's cache. Then how fast
the disk itself is, by ``dd`` with direct I/O: one reader, and as many as the tier has threads. Answers must not change.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np

from pagebus.actors.bench.driver.deployment import Deployment, as_served, deployed
from pagebus.actors.bench.driver.graphs import told_by_lease, until_captured
from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor.memory.disk_tier import NUM_THREADS
from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import add_arguments, load_settings
from pagebus.actors.telemetry.progress import Progress

QUIET_S = 2.0
"""Counters follow what they count by a second."""
WRITTEN = "pagebus:disk_written_blocks_total"
DIRECT_BYTES = 2 << 20
"""What ``dd`` reads at a time: the size of a block of llama8b."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt: how long it took, the blocks that were read for it, and the answer."""

    ms: float
    blocks: int
    text: str


class Client:
    """Asks a deployment over HTTP, and reads its metrics."""

    def __init__(self, deployment: Deployment, session: aiohttp.ClientSession) -> None:
        self._url, self._session = deployment.base_url, session

    async def counted(self, name: str) -> int:
        """A counter of ``/metrics``."""
        async with self._session.get(f"{self._url}/metrics") as response:
            found = re.findall(rf"^{name}\{{.*\}} (\S+)$", await response.text(), re.MULTILINE)
        return int(sum(map(float, found)))

    async def ask(self, prompt: list[int]) -> Asked:
        """Begins when the disk rests, and ends when it rests again."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        before, _ = await self.until_quiet()
        began_s = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            answer = await response.json()
        took_s = time.perf_counter() - began_s
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {answer}")
        after, _ = await self.until_quiet()
        return Asked(took_s * 1e3, after - before, answer["choices"][0]["text"])

    async def until_quiet(self) -> tuple[int, int]:
        """Until nothing was read or written for ``QUIET_S``; blocks read and written so far."""
        told, since_s = (0, 0), time.monotonic()
        while time.monotonic() - since_s < QUIET_S:
            await asyncio.sleep(0.1)
            now = await self.counted("pagebus:disk_read_blocks_total"), await self.counted(WRITTEN)
            if now != told:
                told, since_s = now, time.monotonic()
        return told


async def life(settings: Settings, folder: Path, prompts: Sequence[list[int]], name: str, times: int) -> list[Asked]:
    """One start: the first prompt warms it up, each other is asked so many ``times``. Returns those, in order."""
    began_s, found = time.monotonic(), []
    async with deployed(as_served(settings, folder), folder / f"{name}.log") as deployment:
        await until_captured(told_by_lease(deployment), Progress(sys.stderr, terminal=False))
        ready_s = time.monotonic() - began_s
        async with aiohttp.ClientSession() as session:
            client = Client(deployment, session)
            await client.ask(prompts[0])
            for prompt in prompts[1:]:
                found += [await client.ask(prompt) for _ in range(times)]
            failed = [await client.counted(f"pagebus:disk_failed_{each}_total") for each in ("reads", "writes")]
    print(f"{name}: ready after {ready_s:.1f} s, {failed[0]} reads and {failed[1]} writes failed", flush=True)
    log = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    print("\n".join(line for line in log if '"disk' in line or "disk tier" in line or '"level": "error"' in line))
    return found


def files_in(cache: Path) -> list[Path]:
    """Those of all blocks."""
    return [each for each in cache.glob("*/blocks/*") if each.is_file()]


def evict(files: Sequence[Path]) -> None:
    """Have the files on the disk alone, and not in the system's page cache."""
    for each in files:
        file = os.open(each, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def direct_rate(file: Path, readers: int) -> float:
    """Bytes per second of ``dd`` with direct I/O, by so many readers of a part each; 0 where there is no such I/O."""
    each = file.stat().st_size // DIRECT_BYTES // readers
    command = ["dd", f"if={file}", "of=/dev/null", f"bs={DIRECT_BYTES}", "iflag=direct", f"count={each}", "status=none"]
    began_s = time.perf_counter()
    running = [subprocess.Popen([*command, f"skip={each * number}"]) for number in range(readers)]
    codes = [process.wait() for process in running]
    return 0.0 if any(codes) else readers * each * DIRECT_BYTES / (time.perf_counter() - began_s)


def show(name: str, asked: Sequence[Asked], file_bytes: int, from_gpu_ms: float = 0.0) -> None:
    """The median, each of them, and how fast it was read."""
    each = ", ".join(f"{one.ms:.1f}" + (f" ({one.blocks} blocks read)" if from_gpu_ms else "") for one in asked)
    rate = ""
    if read := [one for one in asked if one.blocks and 0 < from_gpu_ms < one.ms]:
        rate = f"; {median(one.blocks * file_bytes / GB / (one.ms - from_gpu_ms) * 1e3 for one in read):.2f} GB/s"
    print(f"{name}: {median(one.ms for one in asked):.1f} ms of {each}{rate}", flush=True)


async def measure(arguments: argparse.Namespace, settings: Settings, parent: Path) -> None:
    model = write_model_folder(arguments.shape, parent)
    cache = Path(tempfile.mkdtemp(prefix="blocks-", dir=parent))
    settings = settings.replace(model=str(model), load_format="dummy", disk_cache_dir=str(cache))
    drawn = np.random.default_rng(0)
    vocab = int(SHAPES[arguments.shape]["vocab_size"])
    prompts = [drawn.integers(3, vocab - 1000, arguments.tokens).tolist() for _ in range(arguments.prompts + 1)]

    first = await life(settings, parent, prompts, "first life", 2)
    files = files_in(cache)
    file_bytes = max((each.stat().st_size for each in files), default=0)
    print(f"{len(files)} files of {file_bytes} bytes, {len(files) * file_bytes / GB:.2f} GB", flush=True)
    second = await life(settings, parent, prompts, "second life, files in the page cache", 1)
    evict(files)
    third = await life(settings, parent, prompts, "third life, files on the disk", 1)

    computed, again = first[::2], first[1::2]
    from_gpu_ms = median(one.ms for one in again)
    print(f"{arguments.shape}, {arguments.prompts} prompts of {arguments.tokens} tokens, until the first token:")
    show("computed", computed, file_bytes)
    show("again, from the GPU's cache", again, file_bytes)
    show("after a restart, files in the page cache", second, file_bytes, from_gpu_ms)
    show("after a restart, files on the disk", third, file_bytes, from_gpu_ms)
    told = [one.text for one in computed]
    same = all([one.text for one in others] == told for others in (again, second, third))
    print("all answers are the same" if same else f"ANSWERS DIFFER: {[computed, again, second, third]}")

    whole = parent / "direct"
    with whole.open("wb") as out:
        for each in files[:2048]:
            out.write(each.read_bytes())
    evict([whole])
    for readers in (1, NUM_THREADS):
        print(f"dd with direct I/O, {readers} readers: {direct_rate(whole, readers) / GB:.2f} GB/s", flush=True)
    whole.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=15_000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--disk", type=Path, help="where the files lie (default: the folder for temporary files)")
    add_arguments(parser, model=False)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="pagebus-bench-", dir=arguments.disk) as folder:
        asyncio.run(measure(arguments, load_settings(arguments), Path(folder)))


if __name__ == "__main__":
    main()
