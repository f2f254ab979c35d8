"""Two stages of a tiny model, each a process, on two GPUs or both on one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu.ranks.rank_processes import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_tokens_are_right() -> None:
    command = [sys.executable, "-m", "tests.gpu.ranks.check_stages", "--families", "qwen2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
