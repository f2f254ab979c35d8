"""Where a user's table of measured launch shapes is. Does not import torch.

``pagebus tune`` writes it. Its name has the GPU's capability, multiprocessors and bandwidth, Triton's version and a
digest of the kernels' sources: one that another version wrote is not even looked at.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pagebus.kernels.common.target import Target

SOURCES = (
    "linear/gemv.py", "linear/skinny_gemm.py", "linear/epilogue.py", "linear/activation.py",
    "specialized/hopper_gemm.py", "specialized/hopper_widening.py",
    "layers/norm.py", "common/pdl.py", "coded/tiles.py", "coded/word_tiles.py", "coded/vectors.py", "coded/unpack.py",
    "coded/scales.py", "coded/rounding.py",
)  # fmt: skip
"""The sources that decide how long a product takes, with the norm beside it."""


def user_folder() -> Path:
    """Where a user's tables are unless another folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pagebus", "launch-shapes")


def user_path(target: Target, folder: Path) -> Path:
    """The path of a user's table for a kind of GPU, these versions and these kernels."""
    digest = _sources_digest(Path(__file__).parents[1])
    kind = f"sm_{target.capability}_{target.num_multiprocessors}"
    if target.memory_gb_per_s:
        kind += f"_{target.memory_gb_per_s}GBs"
    return folder / f"{kind}-triton-{_triton_version()}-{digest}.json"


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@cache
def _sources_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:12]
