"""From token ids to hidden states, and from hidden states to logits."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.products import Adapted, AdaptedHead
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.model.spec import HeadSpec


class Embedding:
    """The rows of a [vocabulary, hidden] matrix, times ``scale`` in the matrix' format."""

    __slots__ = ("_ops", "adapted", "scale", "weight")

    def __init__(
        self, parameters: Parameters, name: str, vocab_size: int, hidden_size: int, ops: Ops, scale: float = 1.0
    ) -> None:
        self._ops = ops
        self.adapted: Adapted | None = None
        """What adapters add, where there may be any: times ``scale`` as well."""
        self.scale = torch.tensor(scale, dtype=parameters.dtype).item()
        self.weight = parameters.matrix({f"{name}.weight": vocab_size}, hidden_size)

    def adapt(self, adapted: Adapted) -> None:
        """Have adapters add to it what they have."""
        self.adapted = adapted

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] integers inside the vocabulary -> [T, H], a new tensor."""
        return self._with_adapters(input_ids, self._ops.embedding(input_ids, self.weight, self.scale))

    def _with_adapters(self, input_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [T, H], to which what adapters have for these tokens is added."""
        addition = None if self.adapted is None else self.adapted.addition
        return rows if addition is None else self._ops.add_to_embedding(input_ids, *addition, rows)

    def unscaled(self) -> Self:
        """The same rows as they are stored, for the model alone."""
        plain = copy(self)
        plain.scale, plain.adapted = 1.0, None
        return plain


class Head:
    """Logits over the vocabulary, as ``spec`` says; tied it shares the embedding's matrix."""

    __slots__ = ("_ops", "_spec", "adapted", "own", "weight")

    def __init__(self, parameters: Parameters, name: str, embedding: Embedding, ops: Ops, spec: HeadSpec) -> None:
        self._ops, self._spec = ops, spec
        self.adapted: AdaptedHead | None = None
        """What adapters add, where there may be any."""
        rows, columns = embedding.weight.shape
        self.own = range(rows)
        """The tokens whose logits are computed here."""
        self.weight = embedding.weight if spec.tied else parameters.matrix({f"{name}.weight": rows}, columns)

    def adapt(self, adapted: AdaptedHead) -> None:
        """Have adapters add to it what they have."""
        self.adapted = adapted

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 [R, len(own)]."""
        logits = self._ops.linear(hidden, self.weight, None, torch.float32)
        if self.adapted is not None and (addition := self.adapted.addition) is not None:
            self._ops.add_adapters(hidden, *addition, logits)
        if self._spec.scale != 1.0 or self._spec.softcap:
            self._ops.cap_logits(logits, self._spec.scale, self._spec.softcap)
        return logits
