"""Locking pages of the host tier."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import pytest
import torch

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.memory.host_memory import HostMemory, lock_pages


@pytest.mark.parametrize("code", [0, 2])
def test_what_cannot_be_locked_leaves_no_error_to_the_thread_that_asks(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """CUDA keeps an error for the thread of the call, which is another one."""
    asked: list[tuple[int, int, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            asked.append((address, num_bytes, threading.get_ident()))
            return code

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    pages = ctypes.create_string_buffer(b"x" * 64, 64)
    assert lock_pages(ctypes.addressof(pages), 64, torch.device("cuda", 0)) == (code == 0)
    ((address, num_bytes, thread),) = asked
    assert (address, num_bytes) == (ctypes.addressof(pages), 64)
    assert thread != threading.get_ident()
    assert pages.raw == bytes(64)


def test_a_system_that_gives_no_memory() -> None:
    """Is said with the setting to change: no machine has a hundred PiB of addresses."""
    with pytest.raises(
        EngineError, match=r"no 104857600.0 GiB for the host tier: lower --swap-space \(Cannot allocate"
    ):
        HostMemory(100 << 20, 1 << 30, torch.device("cpu"))
