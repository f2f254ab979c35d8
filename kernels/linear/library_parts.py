"""The library's product in parts: of K, whose sums the norm behind it adds up, or of rows, in two products.

A product of some hundred tokens with few rows has too few tiles for all multiprocessors. The library cuts K then,
clears memory for the sums before, and adds them up in a launch of its own. Here parts of K are a batch of products, and
the norm adds up their sums as it reads them.

A gated product of many rows may have tiles for one and a half rounds of all multiprocessors. In two products, the
second one's tiles are others, which fill its round better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.cublas.product import library_sums

ALIGNED = 64
"""A part of K has a multiple of this many columns, a part of rows of twice as many rows."""


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """K in ``splits`` parts, or the ``first`` rows apart from the others (0: all at once)."""

    splits: int = 1
    first: int = 0

    def fits(self, num_inputs: int) -> bool:
        """Whether K can be divided in this way."""
        return num_inputs % (self.splits * ALIGNED) == 0


def library_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: None, out: torch.Tensor, config: LibraryConfig, *, gated: int
) -> torch.Tensor:
    """x [T, K] times weight [N, K] into ``out`` [splits, T, N] float32, one sum for each part of K. There is neither
    a bias nor an activation."""
    assert bias is None
    assert not gated
    assert config.fits(x.shape[1])
    return library_sums(x, weight, out)


def library_rows(x: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """x [T, K] times weight [N, K] -> [T, N], the ``first`` rows of the weight apart from the others."""
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    torch.mm(x, weight[:first].t(), out=out[:, :first])
    torch.mm(x, weight[first:].t(), out=out[:, first:])
    return out
