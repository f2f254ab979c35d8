"""The residual stream of a forward pass, and where its norms are computed.

Written out, a layer is x += attention(norm(x)), then x += mlp(norm(x)). A kernel of its own for each sum and each norm
would read and write x again and again, so they are fused with the products around them, where a kernel does that:

- a product adds itself to x and does half of the norm that reads x next; the product behind that norm does the rest;
- or it adds itself to x, and no more;
- or the norm adds the product, whole or in partial sums, to x on its way.

Only :class:`ResidualStream` knows which of these it was.
"""

from __future__ import annotations

import torch

from pagebus.actors.executor.layers.linear import ResidualLinear
from pagebus.actors.executor.layers.norm import RMSNorm
from pagebus.kernels.layers.norm import HalfNorm


class ResidualStream:
    """``values`` [T, H]: the sum of the embedding and of what was added, once :meth:`normed` has been asked for."""

    __slots__ = ("_added", "values")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._added: torch.Tensor | HalfNorm | None = None

    def add(self, x: torch.Tensor, product: ResidualLinear, before: RMSNorm | None) -> None:
        """Add the ``product`` of x [T, K]; ``before`` which norm, if that may be half done here."""
        self._added = product.into(self.values, x, before)

    def normed(self, norm: RMSNorm) -> torch.Tensor | HalfNorm:
        """The ``norm`` of the sum, [T, H]; perhaps half of it, which only a product may read."""
        added, self._added = self._added, None
        if added is None:
            return norm(self.values)
        if isinstance(added, HalfNorm):
            return added
        return norm.of_sum(added, self.values)

    def settle(self) -> None:
        """Make ``values`` the sum, where no norm will be asked for."""
        added, self._added = self._added, None
        if added is not None:
            assert isinstance(added, torch.Tensor)
            self.values.add_(added)

    def keep(self, index: torch.Tensor) -> None:
        """Go on with these tokens alone: ``index`` [N] int32. All must have been normed since the last :meth:`add`."""
        assert self._added is None
        self.values = self.values.index_select(0, index)
