"""How far computed numbers are from exact ones."""

from __future__ import annotations

import torch


def worst_row(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row, in the Euclidean norm; both are [N, K]."""
    return float(((result.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)).max())
