"""What adapters add behind a product, whatever has multiplied."""

from __future__ import annotations

import torch

from pagebus.kernels.lora.expand import expand
from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.lora.shrink import shrink


def add_adapters(x: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor) -> torch.Tensor:
    """Add to y [T, N], in place, what each token's adapter makes of x [T, K]; returns y."""
    return expand(shrink(x, table, plan), table, plan, y)
