"""From token ids to hidden states, and from hidden states to logits."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.parameters import Parameters


class Embedding:
    """The rows of a [vocabulary, hidden] matrix."""

    __slots__ = ("_ops", "weight")

    def __init__(self, parameters: Parameters, name: str, vocab_size: int, hidden_size: int, ops: Ops) -> None:
        self._ops = ops
        self.weight = parameters.matrix({f"{name}.weight": vocab_size}, hidden_size)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] integers inside the vocabulary -> [T, H], a new tensor."""
        return self._ops.embedding(input_ids, self.weight)


class Head:
    """Logits over the vocabulary; ``tied`` shares the embedding's matrix."""

    __slots__ = ("_ops", "weight")

    def __init__(self, parameters: Parameters, name: str, embedding: Embedding, ops: Ops, *, tied: bool) -> None:
        self._ops = ops
        rows, columns = embedding.weight.shape
        self.weight = embedding.weight if tied else parameters.matrix({f"{name}.weight": rows}, columns)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 [R, V]."""
        return self._ops.linear(hidden, self.weight, None, torch.float32)
