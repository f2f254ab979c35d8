"""What adapters add to a layer's products, in the passes in which some token has one."""

from __future__ import annotations

import torch

from pagebus.kernels.coded.rounding import RoundedTokens
from pagebus.kernels.linear.linear import whole_norm
from pagebus.kernels.lora.reference import AdapterTable, expand, shrink
from pagebus.kernels.lora.segments import Segments
from pagebus.kernels.quantized.products import Inputs


class AdapterPass:
    """Which tokens of the present pass have which adapter; None: no token has one, and nothing is launched for them.
    ``last``: the same of the tokens that the last layer goes on with."""

    __slots__ = ("last", "segments")

    def __init__(self) -> None:
        self.segments: Segments | None = None
        self.last: Segments | None = None

    def begin(self, segments: Segments | None, last: Segments | None) -> None:
        """For the pass that follows."""
        self.segments, self.last = segments, last

    def keep_last(self) -> None:
        """From here on the pass has the last tokens only."""
        self.segments = self.last


class Adapted:
    """The matrices of one product, of all adapters in their places: ``a`` and ``b`` share ranks and scales."""

    __slots__ = ("_current", "a", "b")

    def __init__(self, a: AdapterTable, b: AdapterTable, current: AdapterPass) -> None:
        self.a, self.b = a, b
        self._current = current

    @property
    def active(self) -> bool:
        """Whether some token of the present pass has an adapter."""
        return self._current.segments is not None

    def add(self, x: Inputs, y: torch.Tensor) -> torch.Tensor:
        """Add to y [T, N], the product of x [T, K], what the adapters of its tokens do."""
        segments = self._current.segments
        if segments is None:
            return y
        assert not isinstance(x, RoundedTokens)  # quantized models have no adapters
        return expand(shrink(whole_norm(x), self.a, segments), self.b, segments, y)
