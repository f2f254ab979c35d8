"""Fixtures of the tests that need a GPU, and one skip for each of their files where there is none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch


class WithoutGpu(pytest.Module):
    """A file of tests on a machine without a GPU. It is imported, as everywhere: what it imports has to be there."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        marks = getattr(self.obj, "pytestmark", [])
        if any(mark.name == "gpu" for mark in (marks if isinstance(marks, list) else [marks])):
            pytest.skip("no CUDA device", allow_module_level=True)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Each process of a run would collect all two thousand tests, and skip them one by one."""
    return None if torch.cuda.is_available() else WithoutGpu.from_parent(parent, path=module_path)


@pytest.fixture
def seeded() -> None:
    """The same random inputs each time, and references in full float32."""
    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = False
