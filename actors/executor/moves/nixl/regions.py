"""Where the own blocks lie, as NIXL has to be told."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks, HostBlocks


@dataclass(frozen=True, slots=True)
class Place:
    """``num_bytes`` at ``base``, an address of this process."""

    base: int
    num_bytes: int
    gpu: int
    """Its number in this process; 0 for host memory, too."""


def place_of(blocks: Blocks) -> Place:
    """Of all blocks."""
    size = blocks.num_blocks * blocks.block_bytes
    if isinstance(blocks, DeviceBlocks):
        return Place(blocks.base, size, blocks.gpu)
    assert isinstance(blocks, HostBlocks)
    return Place(blocks.address, size, 0)
