"""torch's libraries before torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.executor import preload

PRELOAD = """
import sys
from actors.executor.preload import preload_torch
preload_torch().join()
loaded = "libtorch_cpu.so" in open("/proc/self/maps").read()
assert "torch" not in sys.modules
import torch
print(loaded, torch.ones(2).sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_libraries_are_there_before_torch_is_imported() -> None:
    """And torch works with them."""
    done = subprocess.run([sys.executable, "-c", PRELOAD], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True 2.0\n", 0), done.stderr


def test_without_torch_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error, no thread."""
    monkeypatch.setattr(preload, "find_spec", lambda name: None)
    assert preload.preload_torch.__wrapped__() is None
