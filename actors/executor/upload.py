"""One upload per step: everything a step tells the device, packed into one int32 buffer.

The buffer begins with a header of fixed layout, five rows of ``width`` ints (slots, starts, query_start, positions,
indexes). On CUDA it always lies at the same device address, because captured graphs read it there. After it comes
the tail: the step's deltas, one after another, each aligned to 16 bytes. The host side is a ring of pinned buffers, so
that the copy of one step may still be under way while the next is packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from actors.executor.batch import StepWork
from actors.executor.device import new_event
from bus.messages import Int32Array

ALIGN = 4
"""In ints: 16 bytes, what Triton specialises pointers on."""
NUM_ROWS = 5


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


@dataclass(slots=True)
class Header:
    """Views of the header on the device, each with room for every slot; use the first R (or N) entries."""

    slots: torch.Tensor
    starts: torch.Tensor
    query_start: torch.Tensor
    positions: torch.Tensor
    indexes: torch.Tensor


@dataclass(slots=True)
class _HostBuffer:
    tensor: torch.Tensor
    array: Int32Array
    copied: torch.cuda.Event | None


class Uploader:
    """Packs and sends. ``tail_ints`` is what usually fits; a larger tail gets a buffer of its own.

    On a CPU the host buffer itself is what the kernels read: nothing is copied. On the meta device nothing is copied
    either, as it has no memory.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, tail_ints: int, num_buffers: int) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._width = _aligned(max_num_seqs + 2)
        self._dummy_slot = max_num_seqs
        self._header_ints = NUM_ROWS * self._width
        self._capacity = self._header_ints + _aligned(tail_ints)
        self._ring = [self._host_buffer() for _ in range(num_buffers if self._cuda else 1)]
        self._next = 0
        first = self._ring[0].tensor
        on_host = device.type == "cpu"
        self._target = first if on_host else torch.zeros(self._capacity, dtype=torch.int32, device=device)
        rows = self._target[: self._header_ints].view(NUM_ROWS, self._width)
        self.header = Header(*(rows[row] for row in range(NUM_ROWS)))

    def _host_buffer(self) -> _HostBuffer:
        tensor = torch.zeros(self._capacity, dtype=torch.int32, pin_memory=self._cuda)
        return _HostBuffer(tensor, tensor.numpy(), new_event() if self._cuda else None)

    def send(self, work: StepWork, padded_rows: int) -> dict[str, torch.Tensor]:
        """Send header and deltas of ``work``; rows from R up to ``padded_rows`` are rows of nothing (dummy slot).

        Returns the deltas on the device, by name. The header is in :attr:`header`.
        """
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        self._pack_header(buffer.array[: self._header_ints].reshape(NUM_ROWS, self._width), work, padded_rows)
        tail_ints = sum(_aligned(len(values)) for values in work.deltas.values())
        fits = self._header_ints + tail_ints <= self._capacity
        if fits:
            offsets = _pack_tail(buffer.array, self._header_ints, work.deltas)
            used = self._header_ints + tail_ints
        else:
            used = self._header_ints
        if self._cuda:
            self._target[:used].copy_(buffer.tensor[:used], non_blocking=True)
            assert buffer.copied is not None
            buffer.copied.record()
        if fits:
            return {name: self._target[start:end] for name, (start, end) in offsets.items()}
        return self._send_apart(work.deltas, tail_ints)

    def _send_apart(self, deltas: dict[str, Int32Array], tail_ints: int) -> dict[str, torch.Tensor]:
        """A tail too large for the ring: a buffer made for it, which torch keeps until the copy is done."""
        host = torch.empty(tail_ints, dtype=torch.int32, pin_memory=self._cuda)
        offsets = _pack_tail(host.numpy(), 0, deltas)
        tail = host.to(self._device, non_blocking=True)
        return {name: tail[start:end] for name, (start, end) in offsets.items()}

    def _pack_header(self, rows: Int32Array, work: StepWork, padded_rows: int) -> None:
        num_rows, num_sampled = len(work.slots), len(work.positions)
        rows[0, :num_rows] = work.slots
        rows[1, :num_rows] = work.starts
        rows[2, : num_rows + 1] = work.query_start
        rows[3, :num_sampled] = work.positions
        rows[4, :num_sampled] = work.indexes
        if padded_rows > num_rows:
            rows[0, num_rows:padded_rows] = self._dummy_slot
            rows[1, num_rows:padded_rows] = 0
            # No tokens: context length 0, so attention reads nothing and the KV write is skipped.
            rows[2, num_rows + 1 : padded_rows + 1] = work.query_start[-1]
            rows[3, num_rows:padded_rows] = -1
            rows[4, num_rows:padded_rows] = 0


def _pack_tail(target: Int32Array, start: int, deltas: dict[str, Int32Array]) -> dict[str, tuple[int, int]]:
    """Copy each delta to an aligned place; returns (start, end) of each."""
    offsets = {}
    for name, values in deltas.items():
        end = start + len(values)
        target[start:end] = values
        offsets[name] = (start, end)
        start = _aligned(end)
    return offsets


def tail_capacity(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Ints that the deltas of nearly every step fit in: twice (index, value) per token of the budget, and columns."""
    return 4 * max_num_batched_tokens + 32 * max_num_seqs + np.iinfo(np.uint16).max
