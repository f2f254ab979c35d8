"""Ranks on GPUs, over NCCL: its C functions alone, on the stream that is current.

Communicators are never destroyed, since that may wait for a rank that is gone: processes of ranks end by ``os._exit``.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.ranks.links import avoid_multicast

LIBRARY = "libnccl.so.2"
"""torch has loaded it."""
ID_BYTES, SUM = 128, 0
TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class NcclGroup:
    """A communicator of the ranks that have met in ``host``, each with a GPU of its own, ``device``; connected when
    constructed. Works on the current stream, also while that is captured.

    Raises:
        EngineError: NCCL cannot connect the ranks.
    """

    def __init__(self, host: Comm, device: torch.device) -> None:
        avoid_multicast()
        self._rank, self._size, self._nccl = host.rank, host.size, _library()
        self._group = ctypes.c_void_p()
        self._calling = threading.Lock()
        """Steps and captures call from threads of their own, and one communicator takes one call at a time."""
        unique = _Id()
        if host.rank == 0:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)), "begin")
        told = host.all_gather(torch.frombuffer(bytearray(bytes(unique)), dtype=torch.uint8))
        unique = _Id.from_buffer(bytearray(told[0].numpy().tobytes()))
        torch.cuda.set_device(device)
        code = self._nccl.ncclCommInitRank(ctypes.byref(self._group), self._size, unique, self._rank)
        self._check(code, "meet")
        self.all_reduce(self.all_gather(torch.zeros(1, device=device)))
        torch.cuda.current_stream().synchronize()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of every rank, in the order of ranks: [N, ...]."""
        x = x.contiguous()
        gathered = x.new_empty((self._size, *x.shape))
        with self._calling:
            code = self._nccl.ncclAllGather(
                x.data_ptr(), gathered.data_ptr(), x.numel(), TYPES[x.dtype], self._group, _stream()
            )
        self._check(code, "gather")
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, in place if x is contiguous. NCCL sums each number on one rank, and gives it to
        all: the same bits."""
        x = x.contiguous()
        with self._calling:
            code = self._nccl.ncclAllReduce(
                x.data_ptr(), x.data_ptr(), x.numel(), TYPES[x.dtype], SUM, self._group, _stream()
            )
        self._check(code, "sum")
        return x

    def _check(self, code: int, what: str) -> None:
        if code:
            text = self._nccl.ncclGetErrorString(code).decode()
            raise EngineError(f"rank {self._rank} of {self._size} cannot {what} over NCCL: {text}")


class NcclComm(Comm):
    """One of the ranks of ``host``, through which what is on the host goes; all else goes over NCCL.

    NCCL sums in an order that follows from the size. ``invariant``: ranks gather instead, and add up in their order.
    """

    captured_bytes = 0
    """NCCL connects ranks when a size first needs it, and waits for the others meanwhile: not beside steps."""

    def __init__(self, host: Comm, device: torch.device, *, invariant: bool = False) -> None:
        self.rank, self.size = host.rank, host.size
        self._host, self._device, self._invariant = host, device, invariant
        self._met: NcclGroup | None = None

    def connect(self) -> None:
        """As in :class:`Comm`: over the host first, which tells all ranks where NCCL meets."""
        self._host.connect()
        self._met = NcclGroup(self._host, self._device)

    @property
    def _group(self) -> NcclGroup:
        if self._met is None:
            raise EngineError(f"rank {self.rank} has not met the others yet")
        return self._met

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As in :class:`Comm`."""
        return self._host.all_gather(x) if x.is_cpu else self._group.all_gather(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As in :class:`Comm`."""
        return super().all_reduce(x) if x.is_cpu or self._invariant else self._group.all_reduce(x)

    def least(self, value: float) -> float:
        """As in :class:`Comm`, without the GPU."""
        return self._host.least(value)

    def tell_all(self, text: str) -> list[str]:
        """As in :class:`Comm`, without the GPU."""
        return self._host.tell_all(text)

    def close(self) -> None:
        """Leave the host's group only."""
        self._host.close()


def _library() -> Any:
    try:
        nccl = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise EngineError(f"ranks on GPUs need NCCL, which comes with torch: {error}") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetErrorString.argtypes = (number,)
    nccl.ncclGetUniqueId.argtypes = (ctypes.POINTER(_Id),)
    nccl.ncclCommInitRank.argtypes = (ctypes.POINTER(pointer), number, _Id, number)
    nccl.ncclAllGather.argtypes = (pointer, pointer, size, number, pointer, pointer)
    nccl.ncclAllReduce.argtypes = (pointer, pointer, size, number, number, pointer, pointer)
    return nccl


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
