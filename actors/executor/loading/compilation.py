"""Compiles kernels ahead of their launch into Triton's own cache, also for a GPU that is not present.

There is no list of kernels. A dry run of the engine's warm-up launches all of them, with Triton's driver replaced by
one that reports the target GPU. Where Triton would hand a kernel to a background compiler, a separate process compiles
it. Triton's cache is keyed by its version, the kernels' sources, their specialisation, the options and the GPU's
architecture. Every later start with the same key finds the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver
from triton.runtime._async_compile import AsyncCompileMode

from pagebus.actors.executor.device.device import resolve_dtype
from pagebus.actors.executor.loading.dry_run import META, dry_run
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from pagebus.kernels.common.target import Target, compile_for

Compile = Callable[[], Any]


class AbsentGpu(DriverBase):  # type: ignore[misc]
    """What Triton asks about the current GPU, answered for one that is not here."""

    def __init__(self, target: Target) -> None:
        self._capability: int = target.capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """Also the key under which Triton keeps what it has compiled: one for each kind of GPU."""
        return self._capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return str(nvidia.ty_to_cpp(ty))

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("a GPU that is not here cannot be measured")


class _Unlaunched:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        return None


class Processes:
    """Up to ``jobs`` compilations at a time, each in a child of this process, which must not have used a GPU."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._context = multiprocessing.get_context("fork")
        self._running: dict[int, BaseProcess] = {}
        self.failed = 0

    def start(self, compile_kernel: Compile) -> None:
        """Begin one, once there is room."""
        while len(self._running) >= self._jobs:
            self._reap()
        process = self._context.Process(target=_compile, args=(compile_kernel,), daemon=True)
        process.start()
        self._running[process.sentinel] = process

    def finish(self) -> None:
        """Until all have ended."""
        while self._running:
            self._reap()

    def _reap(self) -> None:
        for sentinel in wait(list(self._running)):
            process = self._running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            self.failed += process.exitcode != 0


class Recorder(AsyncCompileMode):  # type: ignore[misc]
    """While it is entered, launches compile nothing: each kernel whose key in the cache is not
    in ``keys`` is given to ``on_kernel`` instead."""

    def __init__(self, keys: set[str], on_kernel: Callable[[Compile], None]) -> None:
        super().__init__(None)
        self._keys = keys
        self._on_kernel = on_kernel

    def submit(self, key: str, compile_fn: Compile, finalize_fn: Callable[[object], None]) -> _Unlaunched:
        if key not in self._keys:
            self._keys.add(key)
            self._on_kernel(compile_fn)
        kernel = _Unlaunched()
        finalize_fn(kernel)
        return kernel


class Turn:
    """Of several processes that compile nearly the same, such as the ranks of a group, one compiles after another: the
    later ones find most kernels in the cache. ``path`` is a file of the host that is locked until :meth:`end`, or the
    end of the process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def take(self, *, wait: bool) -> bool:
        """Whether it is this process's turn; if it may ``wait``, it is."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: all compile at once
            return True
        return True

    def end(self) -> None:
        """Others go on."""
        self._file.close()


def compile_kernels(settings: Settings, config: ModelConfig, target: Target, jobs: int, turn: Turn) -> int:
    """Fill Triton's cache with all that an engine with these settings launches on ``target``; returns how many kernels.
    Others who do the same have their ``turn`` after this process, or before it.

    Raises:
        RuntimeError: some could not be compiled; what the compiler said is on standard error.
    """
    processes, later = Processes(jobs), list[Compile]()
    start = processes.start if turn.take(wait=False) else later.append
    start(_build_utilities)
    recorded = record(settings, config, target, start)
    if later:
        turn.take(wait=True)
        for each in later:
            processes.start(each)
    processes.finish()
    turn.end()
    if processes.failed:
        raise RuntimeError(f"{processes.failed} of {len(recorded)} kernels could not be compiled")
    return len(recorded)


def leave_out_torch_compile() -> None:
    """Keep torch.compile from being imported. Functions that infer shapes on the meta device are marked as not to be
    compiled by it, and the import for these marks alone takes longer than everything else in a dry run."""
    sys.modules.setdefault("torch._dynamo", SimpleNamespace(disable=lambda function, *_, **__: function))  # type: ignore[arg-type]


def record(settings: Settings, config: ModelConfig, target: Target, on_kernel: Callable[[Compile], None]) -> set[str]:
    """Make a dry run, and give each kernel to ``on_kernel`` at its first launch; returns their keys in the cache."""
    leave_out_torch_compile()
    compile_for(target)
    driver.set_active(AbsentGpu(target))
    keys: set[str] = set()
    with Recorder(keys, on_kernel):
        dry_run(settings, config, resolve_dtype(settings, config.dtype, META))
    return keys


# -- in a child -------------------------------------------------------------------------------------------------------


def _compile(compile_kernel: Compile) -> None:
    kernel = compile_kernel()
    if kernel is not None and hasattr(nvidia, "make_launcher"):  # one for each signature, up to Triton 3.6
        _build(lambda: nvidia.CudaLauncher(kernel.src, kernel.metadata))


def _build_utilities() -> None:
    """What Triton launches all kernels with."""
    _build(nvidia.CudaUtils)


def _build(make: Callable[[], object]) -> None:
    """Have Triton compile C code into its cache."""
    if _has_driver():
        make()
        return
    with tempfile.TemporaryDirectory() as folder:
        knobs.nvidia.libcuda_path = folder
        command = [os.environ.get("CC", "gcc"), "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null"]
        subprocess.run([*command, "-o", f"{folder}/libcuda.so.1"], check=True)
        logging.getLogger(build.__name__).setLevel(logging.ERROR)  # no warning that what is there cannot be loaded
        with contextlib.suppress(ImportError):  # without a driver it cannot be loaded, but it is in the cache
            make()


def _has_driver() -> bool:
    """Whether CUDA's library is here to be linked with; an empty one of that name does as well."""
    try:
        return bool(nvidia.libcuda_dirs())
    except (AssertionError, OSError):
        return False
