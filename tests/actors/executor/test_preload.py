"""Libraries before the packages that they belong to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.executor import preload

PRELOAD = """
import sys
from actors.executor.preload import preload
loading = preload()
assert loading.torch.wait(60) and loading.triton.wait(60)
maps = open("/proc/self/maps").read()
assert not {"torch", "triton"} & sys.modules.keys()
import torch, triton
print("libtorch_cpu.so" in maps, "libtriton.so" in maps, torch.ones(2).sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_libraries_are_there_before_torch_is_imported() -> None:
    """And torch works with them."""
    done = subprocess.run([sys.executable, "-c", PRELOAD], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True True 2.0\n", 0), done.stderr


def test_without_torch_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error, and nobody waits."""
    monkeypatch.setattr(preload, "find_spec", lambda name: None)
    loading = preload.preload.__wrapped__()
    assert loading.torch.wait(5.0)
    assert loading.triton.wait(5.0)


IMPORT = """
import sys
from actors.executor.preload import import_torch
import_torch()
import torch
needless = [name for name in sys.modules if name.startswith(("torch.distributions", "torch._meta_reg"))]
print(needless, torch.distributions.Normal(1.0, 2.0).mean.item(), "_meta_registrations" in vars(torch))
"""


def test_what_is_not_needed_of_torch_is_imported_once_it_is_asked_for() -> None:
    """A program that has an LLM in it may use it."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[] 1.0 False\n", 0), done.stderr
