"""Chooses a folder for Python's bytecode cache, if it cannot be beside the sources.

In a read-only environment, or an image made with ``PYTHONDONTWRITEBYTECODE``, every process would otherwise compile
torch, transformers and the rest anew at every start, for seconds.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

LARGE = ("torch", "transformers", "numpy")
"""Packages by which it is decided, those that are installed."""


def keep_bytecode() -> None:
    """For this process and those that it starts: keep bytecode in a folder of our own where there is none otherwise.

    A ``PYTHONPYCACHEPREFIX`` that is given counts as it is.
    """
    if sys.pycache_prefix is not None or not any(map(_is_compiled_each_time, LARGE)):
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pagebus", "bytecode")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no place for it, or no home
        return
    if not os.access(folder, os.W_OK):
        return
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def _is_compiled_each_time(package: str) -> bool:
    """Whether there is no bytecode beside a package's sources, and none will be."""
    spec = find_spec(package)
    if spec is None or spec.cached is None:
        return False
    bytecode = Path(spec.cached)
    if bytecode.exists():
        return False
    folder = bytecode.parent if bytecode.parent.exists() else bytecode.parent.parent
    return sys.dont_write_bytecode or not os.access(folder, os.W_OK)
