"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def seeded() -> None:
    """The same random inputs each time, and references in full float32."""
    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = False
