"""torch, imported in less time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.executor import preload

IMPORT = """
import sys
from actors.executor.preload import import_torch, preload
loading = preload()
assert loading.torch.wait(60) and loading.triton.wait(60)
maps = open("/proc/self/maps").read()
assert not {"torch", "triton"} & sys.modules.keys()
import_torch()
import torch
needless = [name for name in sys.modules if name.startswith(("torch.distributions", "torch._meta_reg"))]
print("libtorch_cpu.so" in maps, "libtriton.so" in maps, needless, torch.distributions.Normal(1.0, 2.0).mean.item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_libraries_come_first_and_what_is_not_needed_last() -> None:
    """Libraries are there before the packages are imported; of torch, what is left out comes once it is asked for: a
    program that has an LLM in it may use it."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True True [] 1.0\n", 0), done.stderr


def test_without_torch_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error, and nobody waits."""
    monkeypatch.setattr(preload, "find_spec", lambda name: None)
    loading = preload.preload.__wrapped__()
    assert loading.torch.wait(5.0)
    assert loading.triton.wait(5.0)
