"""Exchanges beside products: a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class SideStream:
    """A stream of ``device`` whose kernels get multiprocessors before those of other streams, as these become free."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """As :meth:`Comm.beside`. What ``work`` allocates belongs to this stream. It is reused only by work that begins
        behind all that was launched on the current stream, and so behind all that reads it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        done = self._stream.record_event()

        def wait() -> T:
            current.wait_event(done)
            return result

        return wait
