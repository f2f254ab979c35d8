"""torch, imported in less time: its libraries and Triton's are loaded by a thread while an executor still imports other
things, and what of it is not needed is left out in a process that has no other use for it.

Python holds its lock while it loads a library, a call of the C library does not. More than a gigabyte is mapped and set
up in this way before an ``import`` asks for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from pagebus.kernels.common.target import retain_gpu

GLOBAL = "lib/libtorch_global_deps.so"
"""As torch loads it, for everybody."""
TORCH = (GLOBAL, "lib/libtorch_cpu.so", "lib/libtorch_cuda.so")
TRITON = ("_C/libtriton.so",)
"""What is not there is passed over."""
UNUSED = (
    *("_meta_registrations", "distributions", "export", "masked", "nn.intrinsic", "nn.qat", "profiler", "quantization"),
    "utils.data",
)
"""Modules of torch that an executor does not need. The first computes output shapes of operations for compilers, a
fifth of the import."""
VERSIONS = ("2.11", "2.13")
"""Those of torch that were seen to ask for none of these while it is imported."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Set when the libraries are there, or are not to be had: who imports the package before has to wait for them, with
    Python's lock."""

    torch: threading.Event = field(default_factory=threading.Event)
    triton: threading.Event = field(default_factory=threading.Event)


_alone = False


def preload_alone() -> None:
    """Begin, in a process that is an executor's and nothing else.

    Where other code runs, too, torch has to be whole: its modules import one another in circles, and some that come
    later than usual (``torch.compile``, transformers' models) fail if others are missing.
    """
    global _alone
    _alone = True
    preload()


@cache
def preload() -> Loading:
    """Begin, at the first call."""
    loading = Loading()

    def run() -> None:
        try:
            _load("torch", TORCH)
            loading.torch.set()
            _load("triton", TRITON)
        finally:
            loading.torch.set()
            loading.triton.set()

    threading.Thread(target=run, name="preload", daemon=True).start()
    return loading


def _load(package: str, names: tuple[str, ...]) -> None:
    """Load files of a package by the C library's ``dlopen``; nothing where there is no such package or call."""
    spec = find_spec(package)
    try:
        load = ctypes.CDLL(None).dlopen
    except (OSError, AttributeError):
        return
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in names:
            scope = os.RTLD_GLOBAL if name == GLOBAL else os.RTLD_LOCAL
            load(os.fsencode(Path(folder, name)), os.RTLD_LAZY | scope)


@cache
def open_gpu(rank: int = 0) -> None:
    """Open, once, the driver, which takes up to a second, and the GPU of a ``rank``; and the management library, which
    torch asks how many GPUs there are."""
    retain_gpu(rank)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()


def import_torch() -> None:
    """Import torch without :data:`UNUSED`. Code that needs these imports them later, after :func:`preload_alone`."""
    if "torch" in sys.modules:
        return
    preload().torch.wait()
    from importlib.metadata import version  # which takes a while to import, and is left to executors

    known = _alone and ".".join(version("torch").split(".")[:2]) in VERSIONS
    unused = {f"torch.{name}": ModuleType(name) for name in UNUSED if known}
    sys.modules.update(unused)
    try:
        torch = import_module("torch")
    finally:
        for name in unused:
            del sys.modules[name]
    for name in unused:
        parent, _, child = name.rpartition(".")
        vars(sys.modules[parent]).pop(child, None)
    lazy: set[str] = getattr(torch, "_lazy_modules", set())  # modules that torch imports on first use
    lazy.update(name.removeprefix("torch.") for name in unused if name.count(".") == 1)


def import_engine() -> Any:
    """Import :mod:`pagebus.actors.executor.engine`, and with it torch."""
    import_torch()
    return import_module("pagebus.actors.executor.engine")
