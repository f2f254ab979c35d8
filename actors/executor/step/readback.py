"""Bringing sampled tokens back to the host without waiting in the device thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import torch

from pagebus.actors.executor.device.agreement import compare
from pagebus.actors.executor.device.device import new_event
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.sampling.logprobs import Scores
from pagebus.bus.messages import Int32Array


class Origin:
    """One moment on the device's clock and on the wall clock."""

    def __init__(self) -> None:
        self.event = new_event(timing=True)
        self.event.record()
        self.event.synchronize()
        self.at_s = time.time()


class Readback:
    """A pinned buffer for one step's tokens, with events before its work and behind its copy. CUDA only."""

    def __init__(self, max_num_seqs: int, stream: torch.cuda.Stream) -> None:
        self._tensor = torch.zeros(max_num_seqs, dtype=torch.int32, pin_memory=True)
        self._array: Int32Array = self._tensor.numpy()
        self._parts: dict[int, torch.Tensor] = {}
        """Views of the first tokens, by sizes met before."""
        self._stream = stream  # named for each event: torch takes longer to find out which one is current
        self._count = 0
        self._told: torch.Tensor | None = None
        self.agreed: list[list[int]] | None = None
        """What the ranks have told each other when they launched the step; None: there is one rank."""
        self.scores: Scores | None = None
        """Log probabilities that come with the tokens, if requested by any row."""
        self.started = new_event(timing=True)
        self.done = new_event(timing=True)

    def begin(self) -> None:
        """Queue the event before the step's work. Device thread."""
        self.started.record(self._stream)

    def fetch(
        self, sampled: torch.Tensor | None, count: int, scores: Scores | None = None, told: torch.Tensor | None = None
    ) -> None:
        """Queue the copy of ``sampled``, whose first ``count`` are the step's tokens, of ``scores``, and of what ranks
        have ``told`` each other, and the event behind it. Device thread."""
        self.scores = None if scores is None else scores.to_pinned()
        self._count = count if sampled is not None else 0
        if sampled is not None and count:
            size = len(sampled)
            if (part := self._parts.get(size)) is None:
                part = self._parts[size] = self._tensor[:size]
            part.copy_(sampled, non_blocking=True)
        if told is not None:
            if self._told is None:
                self._told = torch.zeros(told.shape, dtype=told.dtype, pin_memory=True)
            self._told.copy_(told, non_blocking=True)
        self.done.record(self._stream)

    def span(self, origin: Origin) -> tuple[float, float]:
        """Begin and end of the step on the device, by the wall clock."""
        began_s = origin.at_s + origin.event.elapsed_time(self.started) / 1e3
        return began_s, origin.at_s + origin.event.elapsed_time(self.done) / 1e3

    def wait(self, check: Callable[[], None]) -> tuple[Int32Array, float]:
        """Wait for the copy; returns the tokens [N] and the seconds the step took on the device. Any thread.

        Args:
            check: looks whether the device had to do without a rank: :meth:`Comm.check`.

        Raises:
            EngineError: it had to, or the ranks have drifted apart.
        """
        self.done.synchronize()
        check()
        if self._told is not None:
            self.agreed = self._told.tolist()
            compare(self.agreed)
        return self._array[: self._count].copy(), self.started.elapsed_time(self.done) / 1e3


class ReadbackPool:
    """The buffers of steps in flight. :meth:`take` waits while all are in use, which bounds the number of steps in
    flight."""

    def __init__(self, max_num_seqs: int, size: int, stream: torch.cuda.Stream) -> None:
        self._free: queue.SimpleQueue[Readback | None] = queue.SimpleQueue()
        self._size = size
        for _ in range(size):
            self._free.put(Readback(max_num_seqs, stream))

    @property
    def is_full(self) -> bool:
        """Whether no step is in flight."""
        return self._free.qsize() >= self._size

    def take(self) -> Readback:
        """A free buffer.

        Raises:
            EngineError: the pool was closed.
        """
        readback = self._free.get()
        if readback is None:
            raise EngineError("no read-back buffer: the completion thread has ended")
        return readback

    def give_back(self, readback: Readback) -> None:
        """Return a buffer whose tokens have been copied out."""
        self._free.put(readback)

    def close(self) -> None:
        """End a waiting :meth:`take`."""
        self._free.put(None)
