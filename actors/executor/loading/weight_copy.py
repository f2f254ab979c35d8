"""Copies weight files into a model's tensors at the speed of memory. Each thread reads a piece into its own buffer and
copies it from there; on CUDA from page-locked memory, while it reads the next piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from threading import Lock, local
from typing import Self

import torch

from pagebus.actors.executor.device.device import new_event, new_stream
from pagebus.actors.model.shards.cuts import Cut

PIECE_BYTES = 8 << 20
"""Long enough to be read and copied at full speed, short enough for many to be under way."""
MAX_THREADS = 8
"""On an H200 with 16 cores 4 threads moved 26 GB/s out of the page cache, 8 moved 33, 12 no more."""
BUFFERS = 2
RUN_BYTES = 1 << 16
"""The least that is worth a read of its own; of shorter runs the bytes between them are read too."""

FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Of weights that are used as they are stored."""
BYTES = "U8"
"""Bytes that mean something to whoever reads them."""
_DTYPES = FORMATS | {BYTES: torch.uint8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a safetensors file's header describes it; its bytes lie from ``offset`` on in the file. ``cut``:
    what is wanted of it, None: all."""

    file: Path
    offset: int
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """From ``offset`` on in ``file`` lie rows of ``width`` values. Each of the ``targets`` [r, c], parts of a model's
    tensor, gets the columns from its number on."""

    file: int
    offset: int
    dtype: torch.dtype
    width: int
    targets: tuple[tuple[int, torch.Tensor], ...]

    @property
    def num_bytes(self) -> int:
        return len(self.targets[0][1]) * self.width * self.dtype.itemsize


def copy_weights(pairs: Sequence[tuple[StoredTensor, torch.Tensor]], on_bytes: Callable[[int], None]) -> None:
    """Fill each tensor, contiguous and of any format, with the values stored for it. ``on_bytes`` hears of every piece
    from whichever thread read it, one call at a time.

    Raises:
        OSError: a file cannot be read, or ends too early.
    """
    with WeightCopier(pairs[0][1].device, on_bytes) as copier:
        copier.begin(pairs)()


class WeightCopier:
    """Threads that copy as :func:`copy_weights` does, which keep their buffers until the context ends."""

    def __init__(self, device: torch.device, on_bytes: Callable[[int], None]) -> None:
        self._device, self._on_bytes = device, on_bytes
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "weights")
        self._files: dict[Path, int] = {}
        self._lock, self._own = Lock(), local()
        self._threads: list[_CopyThread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for thread in self._threads:
            thread.finish()
        for file in self._files.values():
            os.close(file)

    def begin(self, pairs: Sequence[tuple[StoredTensor, torch.Tensor]]) -> Callable[[], None]:
        """Begin to fill tensors, and return what waits for them: on CUDA, what is launched behind it finds them
        filled. Raises OSError, and so does what is returned."""
        ready = None
        if self._device.type == "cuda":
            ready = new_event()
            ready.record()  # earlier users of the tensors' memory are done with it
        pieces = chain.from_iterable(_pieces(self._opened(stored.file), stored, tensor) for stored, tensor in pairs)
        copies = [self._pool.submit(self._copy, piece, ready) for piece in pieces]

        def wait() -> None:
            for copy in copies:
                copy.result()
            for thread in self._threads:
                thread.join_current_stream()

        return wait

    def _opened(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]

    def _copy(self, piece: _Piece, ready: torch.cuda.Event | None) -> None:
        if not hasattr(self._own, "thread"):
            self._own.thread = _CopyThread(self._device)
            with self._lock:
                self._threads.append(self._own.thread)
        self._own.thread.copy(piece, ready)
        with self._lock:
            self._on_bytes(piece.num_bytes)


def _pieces(file: int, stored: StoredTensor, tensor: torch.Tensor) -> Iterator[_Piece]:
    """Pieces that fill the ``tensor``. A cut of rows reads no others; one of columns reads runs of each row where they
    are long, and whole rows where they are short."""
    dtype, cut = _DTYPES[stored.format], stored.cut
    if cut is None:
        yield from _run(file, stored.offset, dtype, tensor.view(-1))
        return
    if cut.is_zero:
        tensor.zero_()
        return
    rows, step = prod(stored.shape[: cut.dim]), prod(stored.shape[cut.dim + 1 :])
    width, size = cut.whole * step, dtype.itemsize
    parts = tensor.view(rows, -1).split([len(each) * step for each in cut.ranges], dim=1)
    if _reads_whole_rows(stored, cut):
        yield from _rows(file, stored.offset, dtype, width, [
            (each.start * step, part) for each, part in zip(cut.ranges, parts, strict=True)
        ])  # fmt: skip
        return
    for row in range(rows):
        for each, part in zip(cut.ranges, parts, strict=True):
            first = stored.offset + (row * width + each.start * step) * size
            yield from _run(file, first, dtype, part[row])


def bytes_to_read(stored: StoredTensor) -> int:
    """What :func:`copy_weights` reads for a tensor."""
    cut = stored.cut
    if cut is None or _reads_whole_rows(stored, cut):
        return stored.num_bytes
    return 0 if cut.is_zero else stored.num_bytes // cut.whole * sum(map(len, cut.ranges))


def _reads_whole_rows(stored: StoredTensor, cut: Cut) -> bool:
    if cut.is_zero or prod(stored.shape[: cut.dim]) == 1:
        return False
    step = prod(stored.shape[cut.dim + 1 :]) * FORMATS[stored.format].itemsize
    return min(map(len, cut.ranges)) * step < RUN_BYTES and cut.whole * step <= PIECE_BYTES


def _run(file: int, offset: int, dtype: torch.dtype, flat: torch.Tensor) -> Iterator[_Piece]:
    """Values that lie behind each other."""
    size = dtype.itemsize
    for start in range(0, len(flat), PIECE_BYTES // size):
        target = flat[start : start + PIECE_BYTES // size].unsqueeze(0)
        yield _Piece(file, offset + start * size, dtype, target.shape[1], ((0, target),))


def _rows(
    file: int, offset: int, dtype: torch.dtype, width: int, targets: Sequence[tuple[int, torch.Tensor]]
) -> Iterator[_Piece]:
    """Columns of rows that are read whole."""
    count, row_bytes = len(targets[0][1]), width * dtype.itemsize
    most = PIECE_BYTES // row_bytes
    for start in range(0, count, most):
        own = tuple((first, part[start : start + most]) for first, part in targets)
        yield _Piece(file, offset + start * row_bytes, dtype, width, own)


class _CopyThread:
    """One thread's buffers, and on CUDA its stream."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._stream = new_stream(device) if on_cuda else None
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0

    def copy(self, piece: _Piece, ready: torch.cuda.Event | None) -> None:
        """Read the piece, and have it copied once its target is ``ready``. The next pieces use the other buffers."""
        index, self._next = self._next, (self._next + 1) % BUFFERS
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        buffer = self._buffers[index][: piece.num_bytes]
        read_into(piece.file, buffer.numpy().data, piece.offset)
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)
        with torch.inference_mode(), self._on_stream():
            values, whole = buffer.view(piece.dtype).view(-1, piece.width), piece.targets[0][1]
            if values.dtype != whole.dtype or values.shape != whole.shape:  # strided copies are the device's work
                values = values.to(whole.device, non_blocking=True)
            for first, target in piece.targets:
                target.copy_(values[:, first : first + target.shape[1]], non_blocking=True)
            if self._stream is not None:
                self._copied[index] = copied = new_event()
                copied.record(self._stream)

    def join_current_stream(self) -> None:
        """What is launched on it from now on waits for the copies under way."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

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
