"""Memory of the host tier: page-locked for CUDA, so that the copy engines reach it without the CPU.

Locking pages takes a good part of a second per GiB, and other calls to the driver wait meanwhile, which would slow the
start. So one chunk is locked first, for measurements, and a thread locks the others once the engine is ready.
:attr:`HostMemory.num_ready` is the number of blocks ready so far.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.memory.layout import Layout
from pagebus.actors.executor.memory.shared_memory import try_shared

CHUNK_BYTES = 64 << 20
"""Locked at a time: enough to make up for the driver's cost per call, too little to hold anybody up for long."""
MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Not reserved: what is not used yet must not keep the process from forking."""
SHARE_OF_FREE = 0.5
GIB = 1 << 30
POLL_S = 0.005


def num_host_blocks(swap_space_gib: float, block_bytes: int, free_bytes: float) -> int:
    """Blocks in the wanted space, and in at most half of the memory that is free for it."""
    return int(min(swap_space_gib * GIB, SHARE_OF_FREE * max(0.0, free_bytes)) // block_bytes)


def _map(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, MAP_FLAGS)
    except OSError as error:
        text = f"the system gives no {num_bytes / GIB:.1f} GiB for the host tier: lower --swap-space"
        raise EngineError(f"{text} ({error.strerror})") from error


def lock_pages(address: int, num_bytes: int, device: torch.device) -> bool:
    """Fill pages with zeros and lock them for ``device``. False if there is a limit on locked memory.

    CUDA keeps an error for its thread, where torch would report it of the next launch; so a thread of its own locks.
    """
    ctypes.memset(address, 0, num_bytes)  # the system gives the pages now, not while the driver is locked
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_register, address, num_bytes, device).result()


def _register(address: int, num_bytes: int, device: torch.device) -> bool:
    with torch.cuda.device(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0


def unlock_pages(address: int) -> None:
    """Unlock the pages that were locked from this address on, before they are given back."""
    torch.cuda.cudart().cudaHostUnregister(address)


class HostMemory:
    """``num_blocks`` blocks of ``block_bytes`` bytes. Pages are taken from the system when they are first locked
    (CUDA) or written (CPU). No block lies in two chunks, since no copy may touch two registrations. ``shared``: other
    processes may read them, if the system has such memory; it is then :attr:`shared`."""

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device, *, shared: bool = False) -> None:
        self.num_blocks = num_blocks
        self.num_ready = 0 if device.type == "cuda" else num_blocks
        self.block_bytes = block_bytes
        self.device = device
        self._per_chunk = max(1, CHUNK_BYTES // block_bytes)
        page = mmap.PAGESIZE
        self._stride = -(-self._per_chunk * block_bytes // page) * page
        self._num_chunks = -(-num_blocks // self._per_chunk)
        self.layout = Layout(block_bytes, self._per_chunk, self._stride)
        num_bytes = max(page, self._num_chunks * self._stride)
        self.shared = try_shared(num_bytes) if shared and num_blocks else None
        self._map = _map(num_bytes) if self.shared is None else self.shared.map
        if device.type == "cuda" and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        own = np.frombuffer(self._map, np.uint8) if self.shared is None else self.shared.bytes
        self._bytes: NDArray[np.uint8] = own
        self._address = int(self._bytes.ctypes.data)
        self._locked = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type == "cuda" and num_blocks:
            self._lock_next()

    def use(self, num_blocks: int) -> None:
        """Use no more than that many blocks: ranks have equally many."""
        self.num_blocks = min(self.num_blocks, num_blocks)
        self.num_ready = min(self.num_ready, self.num_blocks)

    def lock_rest(self) -> None:
        """Begin to lock what is not locked yet, in the background."""
        if self.num_ready < self.num_blocks:
            self._thread = threading.Thread(target=self._lock_rest, name="engine-host-memory", daemon=True)
            self._thread.start()

    def block(self, index: int) -> NDArray[np.uint8]:
        """The bytes of one block."""
        start = self.layout.offset(index)
        return self._bytes[start : start + self.block_bytes]

    def addresses(self, blocks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Addresses of blocks in this process."""
        return self._address + self.layout.offsets(blocks)

    @property
    def address(self) -> int:
        """Address of the first block."""
        return self._address

    def wait(self, num_blocks: int, timeout_s: float) -> bool:
        """Until that many blocks are ready, or all that will ever be; False if it takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while self.num_ready < num_blocks and self._thread is not None and self._thread.is_alive():
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
        return self.num_ready >= num_blocks

    def _lock_rest(self) -> None:
        while self._locked < self._num_chunks and not self._closing.is_set():
            if not self._lock_next():
                return

    def _lock_next(self) -> bool:
        """Lock one more chunk. False if there is a limit on locked memory: what is locked so far is the tier."""
        address = self._address + self._locked * self._stride
        if not lock_pages(address, self._stride, self.device):
            return False
        self._locked += 1
        self.num_ready = min(self.num_blocks, self._locked * self._per_chunk)
        return True

    def close(self) -> None:
        """Give the pages back. No copy may be under way."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        while self._locked:
            self._locked -= 1
            unlock_pages(self._address + self._locked * self._stride)
        self.num_ready = 0
        if self.shared is not None:
            self.shared.close()
