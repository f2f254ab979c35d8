"""The own cache on a GPU, as pulls and the server see it. Copies run on streams of their own, beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np
import torch

from pagebus.actors.executor.device.device import new_event, new_stream
from pagebus.actors.executor.device.promises import Early
from pagebus.actors.executor.memory.block_cuts import Cut, put
from pagebus.actors.executor.memory.layout import Layout
from pagebus.actors.executor.moves.carriers.driver import Driver
from pagebus.actors.executor.moves.carriers.errors import Abandoned
from pagebus.actors.executor.moves.carriers.runs import Run, chunks, num_last, runs
from pagebus.bus.messages import Int32Array

CHUNK_BYTES = 16 << 20
"""Size of each of two page-locked buffers: one is copied while the other is sent or received."""
CHUNK_BLOCKS = 128
RUN_BYTES = 64 << 20
COPIES_PER_EVENT = 128
"""At most twice as many are queued at a time, which surely fit in the driver's queue."""


class DeviceBlocks:
    """``kv_cache`` [num_blocks, ...] on CUDA."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._cache = kv_cache  # keeps the memory
        self.num_blocks, self.block_bytes = len(kv_cache), kv_cache.nbytes // len(kv_cache)
        self.base, self.driver, self.gpu = kv_cache.data_ptr(), Driver(), kv_cache.device.index or 0
        self._incoming, self._outgoing = new_stream(kv_cache.device), new_stream(kv_cache.device)
        self._per_chunk = max(1, min(CHUNK_BLOCKS, CHUNK_BYTES // self.block_bytes))

    def prepare_thread(self) -> None:
        """As in :class:`Blocks`."""
        torch.cuda.set_device(self._cache.device)

    def copy_from(
        self,
        base: int,
        sources: Int32Array,
        targets: Int32Array,
        stop: Callable[[], bool],
        layout: Layout | None = None,
        early: Early | None = None,
    ) -> None:
        """Copy blocks of the memory at ``base``, an address of this process, and wait until they are there. ``stop``
        says whether nobody waits for them any more. ``layout``: of the sources, if they do not lie one behind the
        other. ``early``: what may be told before that.

        Raises:
            MoveError: the driver refuses.
        """
        joined = runs(sources, targets, max(1, RUN_BYTES // self.block_bytes), layout.per_chunk if layout else 0)
        last = 0 if early is None else num_last(joined, early.num_blocks, COPIES_PER_EVENT)
        parts = [joined[start : start + COPIES_PER_EVENT] for start in range(0, len(joined) - last, COPIES_PER_EVENT)]
        parts += [joined[-last:]] if last else []
        flying: deque[torch.cuda.Event] = deque()
        try:
            for part in parts:
                if stop():
                    raise Abandoned("abandoned")
                self._copy(base, self.base, part, self._incoming, layout)
                flying.append(_mark(self._incoming))
                if len(flying) == 2:
                    flying.popleft().synchronize()
            if early is not None and last:
                early.tell(flying[-1])
        finally:
            _mark(self._incoming).synchronize()

    def read(self, ids: Int32Array) -> Iterator[memoryview]:
        """As in :class:`Blocks`."""
        parts, buffers = list(chunks(ids, self._per_chunk)), self._buffers()

        def begin(index: int) -> torch.cuda.Event:
            part = parts[index]
            joined = runs(part, _places(part), len(part))
            self._copy(self.base, buffers[index % 2].data_ptr(), joined, self._outgoing)
            return _mark(self._outgoing)

        try:
            done = begin(0)
            for index, part in enumerate(parts):
                following = begin(index + 1) if index + 1 < len(parts) else None
                done.synchronize()
                yield buffers[index % 2].numpy()[: len(part) * self.block_bytes].data
                done = following or done
        finally:
            _mark(self._outgoing).synchronize()

    def fill(self, ids: Int32Array, receive: Callable[[memoryview], None]) -> None:
        """As in :class:`Blocks`."""
        buffers = self._buffers()
        used: dict[int, torch.cuda.Event] = {}
        try:
            for index, part in enumerate(chunks(ids, self._per_chunk)):
                place = index % 2
                if place in used:
                    used[place].synchronize()
                receive(buffers[place].numpy()[: len(part) * self.block_bytes].data)
                self._copy(buffers[place].data_ptr(), self.base, runs(_places(part), part, len(part)), self._incoming)
                used[place] = _mark(self._incoming)
        finally:
            _mark(self._incoming).synchronize()

    def beside(self, num_blocks: int, block_bytes: int) -> Self:
        """As in :class:`Blocks`."""
        return type(self)(torch.empty(num_blocks, block_bytes, dtype=torch.uint8, device=self._cache.device))

    def put(self, targets: Int32Array, staged: Self, cuts: Sequence[Cut]) -> None:
        """As in :class:`Blocks`."""
        with torch.inference_mode(), torch.cuda.stream(self._incoming):
            put(self._bytes, targets, staged._bytes, cuts)
            _mark(self._incoming).synchronize()

    @property
    def _bytes(self) -> torch.Tensor:
        return self._cache.view(self.num_blocks, -1).view(torch.uint8)

    def _copy(
        self, source_base: int, target_base: int, joined: list[Run], stream: torch.cuda.Stream,
        layout: Layout | None = None,
    ) -> None:  # fmt: skip
        blocks, targets, counts = np.array(joined, np.uint64).T
        size = np.uint64(self.block_bytes)
        offsets = blocks * size if layout is None else layout.offsets(blocks).astype(np.uint64)
        sources, targets = offsets + np.uint64(source_base), targets * size + np.uint64(target_base)
        self.driver.copy(targets, sources, np.ascontiguousarray(counts * size), stream.cuda_stream)

    def _buffers(self) -> list[torch.Tensor]:
        size = self._per_chunk * self.block_bytes
        return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = new_event(blocking=True)
    event.record(stream)
    return event


def _places(part: Int32Array) -> Int32Array:
    """Of blocks that lie one behind the other in a buffer."""
    return np.arange(len(part), dtype=np.int32)
