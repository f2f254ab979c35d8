"""Matrix products with weights, one or several checkpoint projections at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.products import Adapted, Addition
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.kernels.coded.rounding import RoundedTokens
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.quantized.layouts import Weight
from pagebus.kernels.quantized.products import Inputs


class Linear:
    """x [T, in] -> [T, out]. ``outputs`` maps the projections that are fused to their widths, in order. ``by_rows``:
    the rows of the weight will be reordered. ``modules`` are the projections by their whole names. ``order`` [out]: the
    rows of the checkpoint in our order; None: as they were."""

    __slots__ = ("_ops", "adapted", "bias", "modules", "order", "weight")

    form = "plain"

    def __init__(
        self, parameters: Parameters, prefix: str, outputs: Mapping[str, int], num_inputs: int, ops: Ops, *, bias: bool,
        by_rows: bool = False,
    ) -> None:  # fmt: skip
        self._ops = ops
        self.adapted: Adapted | None = None
        """What adapters add, where there may be any."""
        self.order: torch.Tensor | None = None
        self.modules = {f"{prefix}.{name}": size for name, size in outputs.items()}
        self.weight: Weight = parameters.weight(self.modules, num_inputs, by_rows=by_rows)
        biases = {f"{prefix}.{name}.bias": size for name, size in outputs.items()}
        self.bias = parameters.bias(biases) if bias else None

    def adapt(self, adapted: Adapted) -> None:
        """Have adapters add to it what they have."""
        self.adapted = adapted

    def __call__(self, x: Inputs) -> torch.Tensor:
        addition = self._addition
        if addition is None:
            return self._ops.linear(x, self.weight, self.bias)
        return self._ops.adapted_linear(_exact(x), self.weight, self.bias, *addition)

    @property
    def _addition(self) -> Addition | None:
        """What adapters add in the present pass."""
        return None if self.adapted is None else self.adapted.addition

    def rounding(self, x: Inputs) -> torch.dtype | None:
        """To what its inputs may be rounded where they are made, of as many tokens as x [T, ...] has. Adapters read
        them as they are."""
        return None if self._addition is not None else self._ops.rounding(x, self.weight, self.form)

    def reorder(self, rows: torch.Tensor) -> None:
        """Put these rows of weight and bias in place of the first ones."""
        every = torch.cat((rows, torch.arange(len(rows), self.weight.shape[-2], device=rows.device)))
        self.order = every if self.order is None else self.order[every]
        for tensor in (self.weight, self.bias):
            if isinstance(tensor, torch.Tensor):
                tensor[: len(rows)] = tensor.index_select(0, rows)
        if not isinstance(self.weight, torch.Tensor):
            self.weight.reorder(every)


class ResidualLinear(Linear):
    """A product that goes into the residual [T, out]; of a rank it is a part of the sum that does."""

    __slots__ = ("_counters",)

    form = "partial"

    def __init__(
        self, parameters: Parameters, prefix: str, outputs: Mapping[str, int], num_inputs: int, ops: Ops, *, bias: bool
    ) -> None:
        super().__init__(parameters, prefix, outputs, num_inputs, ops, bias=bias)
        self._counters = torch.zeros(self.weight.shape[0], dtype=torch.int32, device=parameters.device)

    def into(
        self, residual: torch.Tensor, x: torch.Tensor | RoundedTokens, before: Norm | None
    ) -> torch.Tensor | HalfNorm | None:
        """The product of x for ``residual`` [T, out]; ``before`` which norm, if that may be half done here.

        It is still to be added, as [T, out] or as partial sums [S, T, out]; or it has been, with half of the norm as a
        result; or it has been, and no more (None).
        """
        following = None
        if before is not None and before.may_be_halved:
            following = NextNorm(before.weight, before.eps, self._counters)
        return self._product(x, residual, following)

    def alone(self, x: torch.Tensor | RoundedTokens) -> torch.Tensor:
        """The product of x, added to nothing: [T, out], or partial sums [S, T, out] float32."""
        product = self._product(x, None, None)
        assert isinstance(product, torch.Tensor)
        return product

    def _product(
        self, x: torch.Tensor | RoundedTokens, residual: torch.Tensor | None, following: NextNorm | None
    ) -> torch.Tensor | HalfNorm | None:
        addition = self._addition
        if addition is None:
            return self._ops.partial_linear(x, self.weight, self.bias, residual, following)
        assert isinstance(x, torch.Tensor)
        return self._ops.adapted_partial_linear(x, self.weight, self.bias, residual, following, *addition)


class GatedLinear(Linear):
    """act(gate) * up of the product with two matrices of equal width, gate and up: x [T, in] -> [T, out / 2]."""

    __slots__ = ("_act",)

    form = "gated"

    def __init__(
        self, parameters: Parameters, prefix: str, outputs: Mapping[str, int], num_inputs: int, ops: Ops, *,
        bias: bool, act: str,
    ) -> None:  # fmt: skip
        super().__init__(parameters, prefix, outputs, num_inputs, ops, bias=bias)
        self._act = act

    def __call__(self, x: Inputs) -> torch.Tensor:
        if (addition := self._addition) is not None:
            return self._ops.adapted_gated_linear(
                _exact(x), self.weight, self.bias, *addition, act=self._act
            )  # fmt: skip
        product = self._ops.gated_linear(x, self.weight, self.bias, act=self._act)
        assert isinstance(product, torch.Tensor)
        return product

    def before(self, following: Linear, x: Inputs) -> torch.Tensor | RoundedTokens:
        """The same for the ``following`` product alone, rounded if that would round it."""
        if self._addition is not None:
            return self(x)
        rounded = following.rounding(x)
        return self._ops.gated_linear(x, self.weight, self.bias, act=self._act, rounded=rounded)


def _exact(x: Inputs) -> torch.Tensor | HalfNorm:
    """Inputs of an adapted product, which are never rounded where they are made."""
    assert not isinstance(x, RoundedTokens)
    return x
