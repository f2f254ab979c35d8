"""What adapters add to a product y = x W^T: y += scale (x A^T) B^T (Hu et al., 2021, arXiv 2106.09685), in two steps.

A product may be several modules of a checkpoint side by side, such as q, k and v. Each has a scale and an A of its own,
unless all share one, and writes its own outputs.
"""

from __future__ import annotations

import torch

from pagebus.kernels.lora.pages import PagedTable, read_back
from pagebus.kernels.lora.plan import AdapterPlan


def add_adapters_reference(x: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor) -> torch.Tensor:
    """Add to y [T, N], in place, what each token's adapter makes of x [T, K]; returns y."""
    return add_by_token(x, table, plan.of_token, y)


def add_by_token(x: torch.Tensor, table: PagedTable, of_token: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same, where token t has adapter ``of_token[t]``, -1: none."""
    for adapter in of_token.unique().tolist():
        found = read_back(table, adapter, x.shape[1]) if adapter >= 0 else None
        if found is None:
            continue
        tokens = (of_token == adapter).nonzero().flatten()
        rank, first, given = found.b.shape[1], 0, x[tokens].float()
        for module, (width, scale) in enumerate(zip(table.widths, found.scales, strict=True)):
            rows = slice(None) if len(found.a) == rank else slice(module * rank, (module + 1) * rank)
            s = given @ found.a[rows].float().T * scale
            if found.constant:
                s[:, found.constant - 1] = 1.0
            y[tokens, first : first + width] += (s @ found.b[first : first + width].float().T).to(y.dtype)
            first += width
    return y
