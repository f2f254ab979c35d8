"""Layouts become dense rows by a kernel as by torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.quantized.dequantize import dequantize, dequantize_reference
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS

ALL = LAYOUTS | OTHERS


@pytest.mark.parametrize("columns", [256, 200])
@pytest.mark.parametrize("name", ALL)
def test_rows_are_those_of_the_reference(name: str, columns: int, device: torch.device) -> None:
    """Also from the middle of a block on, and where the last group is a part of one."""
    layout = ALL[name](140, columns, device)
    for start, rows, dtype in (
        (0, 140, torch.float32),
        (19, 40, torch.float16),
        (130, 10, torch.float32),
        (5, 135, torch.float16),
    ):
        out = torch.full((rows, columns), torch.nan, dtype=dtype, device=device)
        expected = dequantize_reference(layout, torch.empty_like(out), start)
        assert torch.equal(dequantize(layout, out, start), expected)
        assert expected.abs().sum() > 0
