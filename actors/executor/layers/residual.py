"""The residual stream of a forward pass, and where its norms are computed.

Written out, a layer is x += attention(norm(x)), then x += mlp(norm(x)). A kernel of its own for each sum and each norm
would read and write x again and again, so they are fused with the products around them, where a kernel does that:

- a product adds itself to x and does half of the norm that reads x next; the product behind that norm does the rest;
- or it adds itself to x, and no more;
- or the norm adds the product, whole or in partial sums, to x on its way; and rounds itself to 8 bits, if the only
  product that reads it would.

What a rank adds is its part of a sum over all ranks, which the operations that add it take first.

Some families norm what is added, or multiply it by a number: then that is always done with the norm that reads x next.
Only :class:`ResidualStream` knows which of these it was.
"""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.linear import Linear, ResidualLinear
from pagebus.actors.executor.layers.norm import Norm
from pagebus.kernels.coded.rounding import RoundedTokens
from pagebus.kernels.layers.norm import HalfNorm
from pagebus.kernels.quantized.products import Inputs


class ResidualStream:
    """``values`` [T, H]: the sum of the embedding and of what was added, once :meth:`normed` has been asked for."""

    __slots__ = ("_added", "_after", "_ops", "_scale", "values")

    def __init__(self, values: torch.Tensor, ops: Ops) -> None:
        self.values, self._ops = values, ops
        self._added: torch.Tensor | HalfNorm | None = None
        self._after: Norm | None = None
        self._scale = 1.0

    def add(
        self, x: torch.Tensor | RoundedTokens, product: ResidualLinear, before: Norm | None, after: Norm | None = None,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Add the ``product`` of x [T, K], normed by ``after`` and times ``scale``; ``before`` which norm, if that may
        be half done here."""
        if after is None and scale == 1.0:
            self._added = product.into(self.values, x, before)
        else:
            self.add_sum(product.alone(x), after, scale)

    def add_sum(self, x: torch.Tensor, after: Norm | None = None, scale: float = 1.0) -> None:
        """Add x [T, H], or the sum of its parts [S, T, H] float32, in the same way."""
        self._added, self._after, self._scale = x, after, scale

    def normed(self, norm: Norm | None, reader: Linear | None = None) -> Inputs:
        """The ``norm`` of the sum, [T, H]; perhaps half of it, which only a product may read. None: the sum itself.
        ``reader``: the one product that reads it, which may be given rounded tokens."""
        if norm is None:
            self.settle()
            return self.values
        added, after, scale = self._take()
        if added is None:
            return norm(self.values)
        if isinstance(added, HalfNorm):
            return added
        if after is None:
            return norm.of_sum(added, self.values, scale, None if reader is None else reader.rounding(self.values))
        normed = after.into(self.values, added, norm)
        assert normed is not None
        return normed

    def settle(self) -> None:
        """Make ``values`` the sum, where no norm will be asked for."""
        added, after, scale = self._take()
        if added is None:
            return
        assert isinstance(added, torch.Tensor)
        if after is not None:
            after.into(self.values, added, None)
            return
        self._ops.add_sum(added, self.values, scale)

    def keep(self, index: torch.Tensor) -> None:
        """Go on with these tokens alone: ``index`` [N] int32. All must have been normed since the last :meth:`add`."""
        assert self._added is None
        self.values = self.values.index_select(0, index)

    def _take(self) -> tuple[torch.Tensor | HalfNorm | None, Norm | None, float]:
        taken = self._added, self._after, self._scale
        self._added, self._after, self._scale = None, None, 1.0
        return taken
