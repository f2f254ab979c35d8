"""The calls of CUDA's driver that torch has not: memory of other processes, and copies of any two addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from pagebus.actors.executor.moves.carriers.errors import MoveError

HANDLE_BYTES = 64
_WITH_PEERS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class Driver:
    """The calls. The thread that makes them has chosen its device."""

    def __init__(self) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._cuda.cuMemGetAddressRange_v2.argtypes = (pointer, pointer, pointer)
        self._cuda.cuIpcGetMemHandle.argtypes = (pointer, pointer)
        self._cuda.cuIpcOpenMemHandle_v2.argtypes = (pointer, _Handle, number)
        self._cuda.cuIpcCloseMemHandle.argtypes = (pointer,)
        # Python keeps its lock in this one, which only queues: to give it up would take longer.
        held: Any = ctypes.PyDLL("libcuda.so.1")
        self._copy = held.cuMemcpyAsync
        self._copy.argtypes = (pointer, pointer, size, pointer)

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that memory lies in, and how far behind its beginning.

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

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between any two of device memory and page-locked host memory.

        Raises:
            MoveError: the driver refuses.
        """
        code = self._copy(target, source, num_bytes, stream)
        if code:
            raise MoveError(f"cuMemcpyAsync: {self._name(code)}")

    def _check(self, call: str, *arguments: object, version: str = "") -> None:
        code = getattr(self._cuda, call + version)(*arguments)
        if code:
            raise MoveError(f"{call}: {self._name(code)}")

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else f"CUDA error {code}"
