"""The own cache on a CPU, as pulls and the server see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pagebus.actors.executor.memory.block_cuts import Cut, put
from pagebus.actors.executor.moves.carriers.runs import runs
from pagebus.bus.messages import Int32Array

PIECE_BYTES = 64 << 20
"""The most that is copied in one call: between two of them a pull may be abandoned."""


class Blocks(Protocol):
    """The own cache's blocks, of one device or another."""

    num_blocks: int
    block_bytes: int

    def prepare_thread(self) -> None:
        """Call it first in a thread that uses them."""
        ...

    def read(self, ids: Int32Array) -> Iterator[memoryview]:
        """The bytes of blocks, in this order, in pieces; each until the next one is asked for."""
        ...

    def fill(self, ids: Int32Array, receive: Callable[[memoryview], None]) -> None:
        """Have ``receive`` write the bytes of blocks, in this order, piece by piece. All are there on return."""
        ...

    def beside(self, num_blocks: int, block_bytes: int) -> Self:
        """Blocks of another size on the same device."""
        ...

    def put(self, targets: Int32Array, staged: Self, cuts: Sequence[Cut]) -> None:
        """Copy what is cut out of staged blocks, the first of these, into ``targets``. All is there on return."""
        ...


class HostBlocks:
    """``kv_cache`` [num_blocks, ...] on the CPU."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._bytes: NDArray[np.uint8] = kv_cache.view(len(kv_cache), -1).view(torch.uint8).numpy()
        self.num_blocks, self.block_bytes = self._bytes.shape
        self.address = int(self._bytes.ctypes.data)

    def prepare_thread(self) -> None:
        """As in :class:`Blocks`."""

    def view(self, first: int, count: int) -> memoryview:
        """The bytes of neighbouring blocks."""
        return self._bytes[first : first + count].reshape(-1).data

    def read(self, ids: Int32Array) -> Iterator[memoryview]:
        """As in :class:`Blocks`."""
        for first, _, count in runs(ids, ids, max(1, PIECE_BYTES // self.block_bytes)):
            yield self.view(first, count)

    def fill(self, ids: Int32Array, receive: Callable[[memoryview], None]) -> None:
        """As in :class:`Blocks`."""
        for piece in self.read(ids):
            receive(piece)

    def beside(self, num_blocks: int, block_bytes: int) -> Self:
        """As in :class:`Blocks`."""
        return type(self)(torch.zeros(num_blocks, block_bytes, dtype=torch.uint8))

    def put(self, targets: Int32Array, staged: Self, cuts: Sequence[Cut]) -> None:
        """As in :class:`Blocks`."""
        put(torch.from_numpy(self._bytes), targets, torch.from_numpy(staged._bytes), cuts)
