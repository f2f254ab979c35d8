"""Checks whether Triton's cache holds every kernel of an executor, and starts the process that fills it.

``pagebus compile-kernels`` fills the cache and leaves a mark there, named by a digest of everything that decides about
launches. An executor that finds no such mark starts the same command beside its own start. It waits for the command
only before its first launch. This module imports neither torch nor Triton, because it checks the mark before them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.runtime.child import PACKAGES, die_with_parent, python_path
from pagebus.actors.settings import GROUPS, Settings
from pagebus.actors.settings.sources import to_args
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, home_folder, user_path

SOURCES = ("pagebus/kernels", "pagebus/actors/executor")
"""Where it is decided what is launched, and with what."""
INDIFFERENT = {
    "seed", "threads", "gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes", "cpu_kv_cache_gib",
    "swap_space", "disk_cache_dir", "disk_cache_gib", "preemption_mode", "enable_prefix_caching", "kv_moves",
    "scheduling_policy", "priority_aging_s", "itl_target_ms", "ttft_target_ms", "pipeline_depth",
    "draft_tensor_parallel_size",
}  # fmt: skip
"""Settings of the engine and its memory that change no kernel."""


def cache_dir() -> Path:
    """Triton's cache: its own rules, without Triton."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")


def mark_path(settings: Settings, config: ModelConfig, target: Target) -> Path:
    """The file that says that the cache is complete for these settings, this model and this kind of GPU."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((PACKAGES / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.read_bytes())
    decisive = {
        spec.name: getattr(settings, spec.name)
        for group in ("engine", "memory")
        for spec in dataclasses.fields(GROUPS[group])
        if spec.name not in INDIFFERENT
    }
    for tuned in Tuned:
        with contextlib.suppress(OSError):  # most have measured nothing
            digest.update(user_path(target, launch_shapes_folder(settings), tuned).read_bytes())
    ranks = "tensor_parallel_size", "pipeline_parallel_size", "rank", "enable_expert_parallel"
    decisive |= {name: getattr(settings, name) for name in ranks}
    digest.update(repr((decisive, config, target, _version("triton"), _version("torch"), sys.version)).encode())
    return cache_dir() / f"pagebus-{digest.hexdigest()[:32]}"


def launch_shapes_folder(settings: Settings) -> Path:
    """Where launch shapes that were measured on this machine are."""
    return home_folder() if settings.launch_shapes_dir is None else Path(settings.launch_shapes_dir)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def read_compiler_version(target: Target) -> None:
    """Have Triton read its own files, half a gigabyte, in this thread: it names kernels by their digests."""
    with contextlib.suppress(ImportError):
        from triton.backends.nvidia.compiler import get_ptxas_version
        from triton.runtime.cache import triton_key

        triton_key()
        get_ptxas_version(target.capability)


def tell_compilations(tell: Callable[[str, float], None]) -> None:
    """From now on call ``tell`` with the name of each kernel that this process compiles, and the seconds it took."""
    with contextlib.suppress(ImportError):
        from triton import knobs

        def listener(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
            if not cache_hit:
                tell(src.name, times.total / 1e6)

        knobs.compilation.listener = listener


class KernelBuild:
    """A process that compiles what the cache lacks. It uses no GPU, and dies with this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._starting = threading.Lock()

    def run(self, config: ModelConfig, target: Target) -> bool:
        """Compile what is not compiled, and wait for it; whether all is there then.

        The thread that calls this is the process's parent: the kernel ends the process when the thread ends.
        """
        if find_spec("triton") is None or self._is_complete(mark_path(self._settings, config, target)):
            return True
        with self._starting:
            if self._stopped:
                return False
            self._process = self._start(target)
        return self._process.wait() == 0

    def _is_complete(self, mark: Path) -> bool:
        """Whether the cache has all; that of ``--kernels-dir`` becomes this process's cache if it has."""
        shipped = self._settings.kernels_dir
        if shipped is not None and Path(shipped, mark.name).exists():
            os.environ["TRITON_CACHE_DIR"] = shipped
            return True
        return mark.exists()

    def _start(self, target: Target) -> subprocess.Popen[bytes]:
        name = f"sm_{target.capability}"
        command = [
            sys.executable, "-P", "-m", "pagebus.actors.commands.cli", "compile-kernels", *to_args(self._settings),
            "--target", name, "--multiprocessors", str(target.num_multiprocessors),
            "--memory-gb-per-s", str(target.memory_gb_per_s),
        ]  # fmt: skip
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = python_path(environ)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ, preexec_fn=die_with_parent()
        )

    def stop(self) -> None:
        """End it at once if it is still at work."""
        with self._starting:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
