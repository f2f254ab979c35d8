"""Caches on GPUs with known content, and a process that has one: ``python -m tests.gpu.moves.device_source``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import torch

from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.shared_memory import SharedMemory
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.own_cache import OwnCache, device_name
from tests.helpers.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]


FIRST_HOST = 7
"""What is added to the numbers of a host tier's blocks in what they hold."""


def content(blocks: list[int], block_bytes: int, device: torch.device) -> torch.Tensor:
    """What a source holds in these blocks."""
    places = torch.arange(block_bytes, device=device)
    numbers = torch.tensor(blocks, device=device)[:, None] * 31
    return ((places * 7 + numbers + 1) % 251).to(torch.uint8)


class DeviceCache:
    """A cache on a GPU of this process. ``filled``: with known content, else zeros."""

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device, *, filled: bool = False) -> None:
        torch.cuda.set_device(device)
        self.tensor = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
        for block in range(num_blocks if filled else 0):
            self.tensor[block] = content([block], block_bytes, device)[0]
        torch.cuda.synchronize(device)
        self.blocks = DeviceBlocks(self.tensor)

    def holds(self, sources: list[int], targets: list[int]) -> bool:
        """Whether ``targets`` hold what a source has in ``sources``."""
        expected = content(sources, self.blocks.block_bytes, self.tensor.device)
        return torch.equal(self.tensor[torch.tensor(targets, device=self.tensor.device)], expected)


def host_memory(num_hosts: int, block_bytes: int, device: torch.device, *, shared: bool = True) -> HostMemory:
    """A host tier, all of it page-locked, with known content."""
    memory = HostMemory(num_hosts, block_bytes, device, shared=shared)
    memory.lock_rest()
    assert memory.wait(num_hosts, LIMIT_S)
    for block in range(num_hosts):
        memory.block(block)[:] = content([FIRST_HOST + block], block_bytes, device)[0].cpu().numpy()
    return memory


class DeviceSource:
    """A process with a filled cache on a GPU, the only one that it sees, a host tier, and a server of both."""

    def __init__(self, device: int, num_blocks: int, block_bytes: int, num_hosts: int = 0) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = visible.split(",")[device] if visible else str(device)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(num_blocks), str(block_bytes), str(num_hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": chosen},
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self.address = Address.parse(self._process.stdout.readline())

    def kill(self) -> None:
        """It is gone."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> None:
    """Tell the address, and live until nobody listens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("num_hosts", type=int)
    asked = parser.parse_args()
    device = torch.device("cuda", 0)
    cache = DeviceCache(asked.num_blocks, asked.block_bytes, device, filled=True)
    memory = host_memory(asked.num_hosts, asked.block_bytes, device)
    own = OwnCache(cache.blocks, SharedMemory(0), device_name(device), listen="127.0.0.1", memory=memory)
    print(own.address.text(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
