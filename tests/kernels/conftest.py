"""Kernel tests run on the GPU where there is one, else in Triton's interpreter, as tests/conftest.py asks it to."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Fresh but repeatable random inputs, and float32 products without tf32."""
    torch.manual_seed(20)
    torch.backends.cuda.matmul.allow_tf32 = False
