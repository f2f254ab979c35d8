"""Where Triton is not installed, as beside a CPU build of torch: the CPU computes, and what needs Triton says so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pagebus.actors.executor.device import device
from pagebus.actors.executor.device.device import resolve_device
from pagebus.actors.settings import Settings, SettingsError
from tests.helpers.waiting import LIMIT_S

WITHOUT = "import sys; sys.modules['triton'] = None\n"
GENERATE = """
from pagebus import LLM, SamplingParams
with LLM(device="cpu", threads=1) as llm:
    (output,) = llm.generate(["A dog is"], SamplingParams(temperature=0, max_tokens=4))
    print(len(output.outputs[0].token_ids))
"""
COMPILE = "from pagebus.actors.commands.cli import main; sys.exit(main(['compile-kernels', '--target', 'sm_90']))"


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A program that finds no Triton."""
    return subprocess.run([sys.executable, "-c", WITHOUT + script], capture_output=True, text=True, timeout=LIMIT_S)


def test_a_cpu_needs_none() -> None:
    """The shipped model generates."""
    done = run(GENERATE)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_compilation_says_what_is_missing() -> None:
    """No traceback, but a line that names the package."""
    done = run(COMPILE)
    assert (done.returncode, done.stderr.count("\n"), "pip install triton" in done.stderr) == (2, 1, True), done.stderr


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that would launch kernels ends at its start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="pip install triton"):
        resolve_device(Settings(device="auto"))
