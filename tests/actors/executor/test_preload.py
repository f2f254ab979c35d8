"""torch, imported in less time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagebus.actors.executor import preload
from tests.helpers.waiting import LIMIT_S

IMPORT = """
import sys
from pagebus.actors.executor.preload import UNUSED, import_torch, preload, preload_alone
preload_alone()
loading = preload()
assert loading.torch.wait(600) and loading.triton.wait(600)
maps = open("/proc/self/maps").read()
assert not {"torch", "triton"} & sys.modules.keys()
import_torch()
import torch
needless = [name for name in UNUSED if "torch." + name in sys.modules]
import torch.utils.data
last = torch.distributions.Normal(1.0, 2.0).mean.item(), torch.utils.data.DataLoader([5]).dataset, torch.export.Dim.AUTO
print("libtorch_cpu.so" in maps, "libtriton.so" in maps, needless, last[:2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_libraries_come_first_and_what_is_not_needed_last() -> None:
    """Libraries are there before the packages are imported; of torch, what is left out in an executor's own process
    comes once it is asked for."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True True [] (1.0, [5])\n", 0), done.stderr


WHOLE = """
import sys
from pagebus.actors.executor.preload import UNUSED, import_torch
import_torch()
print([name for name in UNUSED if "torch." + name not in sys.modules])
"""


def test_a_program_has_all_of_torch() -> None:
    """One with an LLM in it may use whatever there is, in any order."""
    done = subprocess.run([sys.executable, "-c", WHOLE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_without_torch_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error, and nobody waits."""
    monkeypatch.setattr(preload, "find_spec", lambda name: None)
    loading = preload.preload.__wrapped__()
    assert loading.torch.wait(LIMIT_S)
    assert loading.triton.wait(LIMIT_S)
