"""Host memory from which devices copy adapters without the CPU: its pages are locked, which takes the driver's lock.

Launches wait for that lock. So the system gives the pages before, as large ones where it has them, and what was locked
once stays so and is used again.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from pagebus.actors.executor.memory.host_memory import unlock_pages

GRAIN_BYTES = 1 << 20
"""Pieces are multiples of this, so that one fits where another was."""


class _Piece:
    """Locked memory, unlocked when nothing refers to it."""

    def __init__(self, size: int, lock: Callable[[int, int], bool], unlock: Callable[[int], None]) -> None:
        self.map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        address = np.frombuffer(self.map, np.uint8).ctypes.data
        if not lock(address, size):
            raise MemoryError("the system locks no more memory")
        weakref.finalize(self, unlock, address).atexit = False


class PinnedMemory:
    """Pieces of memory that ``lock`` locks and ``unlock`` unlocks. Any thread."""

    def __init__(self, lock: Callable[[int, int], bool], unlock: Callable[[int], None] = unlock_pages) -> None:
        self._lock, self._unlock = lock, unlock
        self._free: defaultdict[int, list[_Piece]] = defaultdict(list)
        """By their sizes."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """A piece [num_bytes] with whatever is in it. It is taken again once the tensor and its views are gone.

        Raises:
            OSError: the system has no more memory.
            MemoryError: it locks no more.
        """
        size = -(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES
        try:
            piece = self._free[size].pop()
        except IndexError:
            piece = _Piece(size, self._lock, self._unlock)
        found = np.frombuffer(piece.map, np.uint8)
        weakref.finalize(found, self._free[size].append, piece).atexit = False
        return torch.from_numpy(found)[:num_bytes]
