"""What a server sends: blocks of the own cache, and behind them, by number, those of the host tier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.bus.messages import Int32Array


class LentBlocks:
    """``blocks``, and those in ``memory``, if there are any."""

    def __init__(self, blocks: Blocks, memory: HostMemory | None) -> None:
        self._blocks, self._memory = blocks, memory
        self.num_blocks = blocks.num_blocks + (0 if memory is None else memory.num_blocks)

    def prepare_thread(self) -> None:
        """As in :class:`Blocks`."""
        self._blocks.prepare_thread()

    def read(self, ids: Int32Array) -> Iterator[memoryview]:
        """As in :class:`Blocks`."""
        on_host = ids >= self._blocks.num_blocks
        for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(on_host)) + 1):
            if not on_host[part[0]] or self._memory is None:
                yield from self._blocks.read(ids[part])
                continue
            for block in (ids[part] - self._blocks.num_blocks).tolist():
                yield self._memory.block(block).data
