"""What NVIDIA's assembler says of kernels for GPUs that need not be here."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.cache import get_cache_manager


def assembler_report(ptx: str, arch: int) -> str:
    """What the assembler says of a kernel. It is kept where Triton keeps what it compiles: the same each time."""
    ptxas, target = get_ptxas(arch), f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
    key = hashlib.sha256("\0".join((ptxas.path, ptxas.version, target, ptx)).encode()).hexdigest()
    cache = get_cache_manager(key)
    if (found := cache.get_file("report.txt")) is not None:
        return Path(found).read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [ptxas.path, "-v", target, str(path), "-o", str(path) + ".out"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    cache.put(text, "report.txt", binary=False)
    return text
