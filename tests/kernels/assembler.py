"""Kernels for GPUs that need not be here, with what NVIDIA's assembler says of them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

KEY = "with what the assembler says"
"""Of these kernels in Triton's cache, where no others find them."""


def keep_reports() -> None:
    """From now on, compiled kernels have it as ``metadata.assembler``, also those that come from Triton's cache."""
    knobs.runtime.add_stages_inspection_hook = _hook


def _hook(backend: Any = None, stages: dict[str, Callable[..., Any]] | None = None, *_: object) -> tuple[str, str]:
    """Called by Triton for a kernel's key, without arguments, and with the steps of compiling it."""
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: _assemble(ptx, metadata, backend.target.arch)
    return KEY, KEY


def _assemble(ptx: str, metadata: dict[str, Any], arch: int) -> bytes:
    """In place of Triton, which would print what is said of every kernel, or of none."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", source, "-o", binary]
        metadata["assembler"] = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
        return binary.read_bytes()
