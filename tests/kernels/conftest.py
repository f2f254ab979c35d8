"""Kernel tests run on the GPU where there is one, else in Triton's interpreter, which has to be asked for early."""

from __future__ import annotations

import os
import sys

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    # Triton decides while functions are decorated. What was imported before by other tests is imported anew, tests of
    # kernels included; the others keep their own modules, of which they only use the references.
    for name in list(sys.modules):
        anew = name.startswith(("triton", "pagebus.kernels", "tests.kernels.")) and name != __name__
        if anew and not name.startswith("triton._C"):
            del sys.modules[name]


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Fresh but repeatable random inputs, and float32 products without tf32."""
    torch.manual_seed(20)
    torch.backends.cuda.matmul.allow_tf32 = False
