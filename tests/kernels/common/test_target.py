"""Which GPU kernels are launched on or compiled for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import pagebus.kernels
from pagebus.kernels.common import target
from pagebus.kernels.common.target import Target, compile_for, target_of

ASKS_TORCH = re.compile(r"torch\.cuda|\.is_cuda|\.type [!=]= \"cuda\"")


def test_meta_tensors_stand_for_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_absent", None)
    compile_for(Target(80, 108))

    assert target_of(torch.device("meta")) == Target(80, 108)
    assert target_of(torch.device("cpu")) is None


def test_no_wrapper_asks_torch_where_it_is() -> None:
    """A rehearsal on the meta device sees what is launched on a GPU only if wrappers ask :func:`target_of` instead.
    What tells cuBLASLt about a product is called for tensors with memory alone."""
    folder = Path(pagebus.kernels.__file__).parent
    told = ("cublas/binding.py", "cublas/plan.py")
    asking = [
        path.name
        for path in sorted(folder.rglob("*.py"))
        if path.name not in ("target.py", "timing.py", "tune.py")
        and path.relative_to(folder).as_posix() not in told
        and ASKS_TORCH.search(path.read_text())
    ]

    assert asking == []
