"""Caches with known content, and a process that has one: ``python -m tests.actors.executor.moves.caches``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import torch

from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.shared_memory import SharedMemory
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.host_blocks import HostBlocks
from pagebus.actors.executor.moves.own_cache import OwnCache

NUM_BLOCKS, BLOCK_BYTES = map(int, os.environ.get("PAGEBUS_TEST_CACHE", "24 6000").split())
"""A benchmark asks for others."""
NUM_HOSTS, FIRST_HOST = 40, 100
"""Blocks of a host tier, and what is added to their numbers in what they hold."""
ROOT = Path(__file__).parents[4]


def content(block: int, num_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """What a block of a source holds."""
    return (np.arange(num_bytes) * 7 + block * 31 + 1).astype(np.uint8)


class LocalCache:
    """A cache of this process, which ``own`` shows to others, with its host tier. ``filled``: with known content, else
    zeros."""

    def __init__(
        self, *, filled: bool = False, listen: str | None = None, num_blocks: int = NUM_BLOCKS, nixl: bool = False
    ) -> None:
        self.shared = SharedMemory(num_blocks * BLOCK_BYTES)
        self.bytes = self.shared.bytes.reshape(num_blocks, BLOCK_BYTES)
        for block in range(num_blocks if filled else 0):
            self.bytes[block] = content(block)
        self.blocks = HostBlocks(torch.from_numpy(self.shared.bytes).view(num_blocks, BLOCK_BYTES))
        self.memory = HostMemory(NUM_HOSTS, BLOCK_BYTES, torch.device("cpu"), shared=True)
        for block in range(NUM_HOSTS if filled else 0):
            self.memory.block(block)[:] = content(FIRST_HOST + block)
        self.own = OwnCache(self.blocks, self.shared, listen=listen, memory=self.memory, nixl=nixl)

    @property
    def address(self) -> Address:
        return self.own.address

    def holds(self, sources: list[int], targets: list[int]) -> bool:
        """Whether ``targets`` hold what a source has in ``sources``."""
        return all(np.array_equal(self.bytes[t], content(s)) for s, t in zip(sources, targets, strict=True))


class OtherProcess:
    """A process with a filled cache, and a server of it. ``nixl``: it lends through NIXL in place of the server."""

    def __init__(self, *, nixl: bool = False) -> None:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *(["nixl"] if nixl else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self.address = Address.parse(self._process.stdout.readline())

    def close_cache(self) -> None:
        """It lives on without its cache."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("close\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "closed\n"

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> None:
    nixl = "nixl" in sys.argv
    cache = LocalCache(filled=True, listen=None if nixl else "127.0.0.1", nixl=nixl)
    print(cache.address.text(), flush=True)
    for _ in sys.stdin:
        cache.own.close()
        print("closed", flush=True)


if __name__ == "__main__":
    main()
