"""The GPU that kernels are launched on or compiled for, as far as launches depend on it. Does not import torch at
import time.

Tensors on torch's "meta" device, which have shapes but no memory, stand for tensors of a GPU that may be absent. Called
with them, wrappers make the choices they would make on the GPU named with :func:`compile_for`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HOPPER = 90
"""The capability whose matrix instructions are for 64 rows and more, and keep large sums in few registers."""
CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSORS, MEMORY_KHZ, MEMORY_BITS = 75, 76, 16, 36, 37
"""Numbers of the driver's device attributes."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU. ``capability``: 90 for sm_90; ``memory_gb_per_s``: its bandwidth as the driver reports it, by
    which GPUs of the same processor differ, or 0: that of the best known one."""

    capability: int
    num_multiprocessors: int
    memory_gb_per_s: int = 0

    @property
    def small_memory(self) -> bool:
        """Whether a multiprocessor has 100 KiB of shared memory, 99 of them for one program."""
        return self.capability in (86, 89, 120, 121)


_absent: Target | None = None


def compile_for(target: Target | None) -> None:
    """Name the GPU that meta tensors stand for, in this process; None: a CPU."""
    global _absent
    _absent = target


def target_of(device: torch.device) -> Target | None:
    """The GPU behind ``device``; None on a CPU. Cheap enough for every launch."""
    return _absent if device.type == "meta" else _present(device)


def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; a small number for a CPU (the interpreter)."""
    target = target_of(device)
    return target.num_multiprocessors if target is not None else 4


@cache
def _present(device: torch.device) -> Target | None:
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    found = Target(10 * properties.major + properties.minor, properties.multi_processor_count)
    first = first_target()  # GPUs of one process are of one kind; what torch tells depends on its version
    return first if first is not None and _alike(first, found) else found


def _alike(one: Target, other: Target) -> bool:
    return (one.capability, one.num_multiprocessors) == (other.capability, other.num_multiprocessors)


def first_target() -> Target | None:
    """The first GPU that this process may use, as the driver reports it, without torch; None if there is none."""
    found = _gpu()
    if found is None:
        return None
    values = [_attribute(*found, name) for name in (CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSORS)]
    if None in values:
        return None
    major, minor, multiprocessors = (value or 0 for value in values)
    khz, bits = (_attribute(*found, name) or 0 for name in (MEMORY_KHZ, MEMORY_BITS))
    return Target(10 * major + minor, multiprocessors, round(2 * khz * bits / 8e6))  # two bits per clock and line


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, name: int) -> int | None:
    value = ctypes.c_int()
    return None if driver.cuDeviceGetAttribute(ctypes.byref(value), name, device) else value.value


def retain_gpu(rank: int = 0) -> None:
    """Create the CUDA context that all of this process shares, on the GPU of a ``rank``, so that torch finds it
    ready."""
    found = _gpu(rank)
    if found is not None:
        driver, device = found
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)


def gpu_id(rank: int = 0) -> str:
    """What tells the GPU of a ``rank`` from any other; empty without one."""
    found, unique = _gpu(rank), (ctypes.c_ubyte * 16)()
    return "" if found is None or found[0].cuDeviceGetUuid_v2(unique, found[1]) else bytes(unique).hex()


@cache
def _gpu(rank: int = 0) -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """The driver, and the GPU of a ``rank``: of those that are visible, in turn."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    return None if driver.cuDeviceGet(ctypes.byref(device), rank % count.value) else (driver, device)
