"""Reads the own host tier, if blocks of a prefix come from there and from another executor: then pulls copy all."""

from __future__ import annotations

from collections.abc import Callable

from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.errors import Abandoned
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.bus.messages import Int32Array


class OwnHosts:
    """The carrier."""

    def __init__(self, memory: HostMemory, own: Blocks) -> None:
        self._memory, self._own = memory, own

    def prepare(self, sources: Int32Array) -> None:
        """As in :class:`Carrier`."""

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """As in :class:`Carrier`."""
        memory, own = self._memory, self._own
        if isinstance(own, DeviceBlocks):
            own.copy_from(memory.address, sources, targets, stop, memory.layout)
            return
        blocks = iter(sources.tolist())

        def receive(piece: memoryview) -> None:
            if stop():
                raise Abandoned("abandoned")
            for start in range(0, len(piece), own.block_bytes):
                piece[start : start + own.block_bytes] = memory.block(next(blocks)).data

        own.fill(targets, receive)

    def close(self) -> None:
        """As in :class:`Carrier`."""
