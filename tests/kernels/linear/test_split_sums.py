"""Sums of parts of K, added up by a kernel."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.specialized.split_sums import add_splits, add_splits_reference


@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_parts_are_added_up(splits: int, biased: bool, device: torch.device) -> None:
    """Of several programs, of which the last is not full; of no tokens."""
    sums = torch.randn(splits, 5, 1008, device=device)
    bias = torch.randn(1008, device=device).half() if biased else None
    out = torch.empty(5, 1008, dtype=torch.float16, device=device)
    expected = add_splits_reference(sums, bias, torch.float16)
    assert (add_splits(sums, bias, out).float() - expected.float()).abs().max() < 4e-3
    assert add_splits(sums[:, :0], bias, out[:0]).shape == (0, 1008)
