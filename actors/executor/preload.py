"""torch's libraries, loaded by a thread while an executor still imports other things.

Python holds its lock while it loads a library, a call of the C library does not. Nearly a gigabyte of torch's is mapped
and set up in this way before ``import torch`` asks for it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so")
"""The first as torch loads it, for everybody; what is not there is passed over."""


@cache
def preload_torch() -> threading.Thread | None:
    """Begin, at the first call; the thread that does it, or None where there is no torch, or no such call."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        load = ctypes.CDLL(None).dlopen
    except (OSError, AttributeError):
        return None
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    folder = Path(spec.submodule_search_locations[0], "lib")

    def run() -> None:
        for name in LIBRARIES:
            scope = os.RTLD_GLOBAL if name == LIBRARIES[0] else os.RTLD_LOCAL
            load(os.fsencode(folder / name), os.RTLD_LAZY | scope)

    thread = threading.Thread(target=run, name="preload", daemon=True)
    thread.start()
    return thread
