"""Calls of CUDA's driver that torch lacks: for memory of other processes, and copies between any two addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.executor.moves.carriers.errors import MoveError

HANDLE_BYTES = 64
_WITH_PEERS = 1
_NOT_SUPPORTED = 801
_IN_STREAM_ORDER = 1
Addresses = NDArray[np.uint64]


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class Driver:
    """The calls. The thread that makes them has chosen its device."""

    def __init__(self) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._cuda.cuMemGetAddressRange_v2.argtypes = (pointer, pointer, pointer)
        self._cuda.cuIpcGetMemHandle.argtypes = (pointer, pointer)
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = (pointer, _Handle, number)
        self._cuda.cuIpcCloseMemHandle.argtypes = (pointer,)
        self._cuda.cuMemHostRegister_v2.argtypes = (pointer, size, number)
        self._cuda.cuMemHostUnregister.argtypes = (pointer,)
        # Calls through this one keep Python's lock: they only queue, and giving it up would take longer.
        held: Any = ctypes.PyDLL("libcuda.so.1")
        self._copy = held.cuMemcpyAsync
        self._copy.argtypes = (pointer, pointer, size, pointer)
        self._batch: Any = getattr(held, "cuMemcpyBatchAsync_v2", None)
        self.in_batches = self._batch is not None
        """Drivers since CUDA 13 can: copies of single blocks then take half the time."""
        if self._batch is not None:
            self._batch.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that holds ``address``, and the offset of the address in it.

        Raises:
            MoveError: there are no handles of such memory.
        """
        base, size, handle = ctypes.c_void_p(), ctypes.c_size_t(), _Handle()
        self._check("cuMemGetAddressRange", ctypes.byref(base), ctypes.byref(size), address, version="_v2")
        start = base.value or 0
        self._check("cuIpcGetMemHandle", ctypes.byref(handle), start)
        return bytes(handle.data), address - start

    def open(self, handle: bytes) -> int:
        """The address at which another process's memory can be read from now on.

        Raises:
            MoveError: it cannot be reached from the thread's device.
        """
        address, wanted = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        self._check("cuIpcOpenMemHandle", ctypes.byref(address), wanted, _WITH_PEERS, version="_v2")
        return address.value or 0

    def close(self, address: int) -> None:
        """Give up what was opened; what fails is left to the end of the process."""
        self._cuda.cuIpcCloseMemHandle(address)

    def lock(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory, so that copies from it need no CPU.

        Raises:
            MoveError: the driver refuses.
        """
        self._check("cuMemHostRegister", address, num_bytes, 0, version="_v2")

    def unlock(self, address: int) -> None:
        """Undo :meth:`lock`; what fails is left to the end of the process."""
        self._cuda.cuMemHostUnregister(address)

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Queue copies between device memory and page-locked host memory, of these sizes in bytes.

        Raises:
            MoveError: the driver refuses.
        """
        if self.in_batches and self._copy_batch(targets, sources, sizes, stream):
            return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            if code := self._copy(target, source, size, stream):
                raise MoveError(f"cuMemcpyAsync: {self._name(code)}")

    def _copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> bool:
        """All in one call; False if this driver cannot."""
        attributes, first = _Attributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
        code = self._batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes), ctypes.byref(attributes),
            ctypes.byref(first), 1, stream,
        )  # fmt: skip
        if code not in (0, _NOT_SUPPORTED):
            raise MoveError(f"cuMemcpyBatchAsync: {self._name(code)}")
        self.in_batches = code == 0
        return self.in_batches

    def _check(self, call: str, *arguments: object, version: str = "") -> None:
        code = getattr(self._cuda, call + version)(*arguments)
        if code:
            raise MoveError(f"{call}: {self._name(code)}")

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else f"CUDA error {code}"
