"""Copies weight files into a model's tensors at the speed of memory. Each thread reads a piece into its own buffer and
copies it from there; on CUDA from page-locked memory, while it reads the next piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock, local

import torch

from pagebus.actors.executor.device.device import new_event, new_stream

PIECE_BYTES = 8 << 20
"""Long enough to be read and copied at full speed, short enough for many to be under way."""
MAX_THREADS = 8
"""On an H200 with 16 cores 4 threads moved 26 GB/s out of the page cache, 8 moved 33, 12 no more."""
BUFFERS = 2


FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a safetensors file's header describes it; its bytes lie from ``offset`` on in the file."""

    file: Path
    offset: int
    format: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """``target`` [n] is a part of a model's tensor, whose values lie from ``offset`` on in ``file``."""

    file: int
    offset: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return len(self.target) * self.dtype.itemsize


def copy_weights(pairs: Sequence[tuple[StoredTensor, torch.Tensor]], on_bytes: Callable[[int], None]) -> None:
    """Fill each tensor, contiguous and of any format, with the values stored for it. ``on_bytes`` hears of every piece
    from whichever thread read it, one call at a time.

    Raises:
        OSError: a file cannot be read, or ends too early.
    """
    device = pairs[0][1].device
    lock, own = Lock(), local()
    ready = None
    if device.type == "cuda":
        ready = new_event()
        ready.record()

    def copy(piece: _Piece) -> None:
        if not hasattr(own, "thread"):
            own.thread = _CopyThread(device, ready)
            with lock:
                made.append(own.thread)
        own.thread.copy(piece)
        with lock:
            on_bytes(piece.num_bytes)

    made: list[_CopyThread] = []
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for stored, _ in pairs:
            if stored.file not in files:
                files[stored.file] = os.open(stored.file, os.O_RDONLY)
                stack.callback(os.close, files[stored.file])
        pieces = chain.from_iterable(_pieces(files[stored.file], stored, tensor) for stored, tensor in pairs)
        with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "weights") as pool:
            list(pool.map(copy, pieces))
        for each in made:
            each.finish()


def _pieces(file: int, stored: StoredTensor, tensor: torch.Tensor) -> Iterator[_Piece]:
    dtype, flat = FORMATS[stored.format], tensor.view(-1)
    size = dtype.itemsize
    for start in range(0, len(flat), PIECE_BYTES // size):
        target = flat[start : start + PIECE_BYTES // size]
        yield _Piece(file, stored.offset + start * size, dtype, target)


class _CopyThread:
    """One thread's buffers, and on CUDA its stream."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event | None) -> None:
        self._stream = None
        if ready is not None:
            self._stream = new_stream(device)
            self._stream.wait_event(ready)  # earlier users of the tensors' memory are done with it
        self._buffers = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=ready is not None) for _ in range(BUFFERS)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0

    def copy(self, piece: _Piece) -> None:
        """Read the piece and have it copied. The next pieces use the other buffers."""
        index, self._next = self._next, (self._next + 1) % BUFFERS
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        buffer = self._buffers[index][: piece.num_bytes]
        read_into(piece.file, buffer.numpy().data, piece.offset)
        with torch.inference_mode(), self._on_stream():
            values = buffer.view(piece.dtype)
            if values.dtype != piece.target.dtype:
                values = values.to(piece.target.device, non_blocking=True)
            piece.target.copy_(values, non_blocking=True)
            if self._stream is not None:
                self._copied[index] = copied = new_event()
                copied.record(self._stream)

    def finish(self) -> None:
        """Wait for the copies under way."""
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def read_into(file: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` from ``offset`` on. Raises OSError."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], offset + done)
        if not count:
            raise OSError("a weight file became shorter while it was read")
        done += count
