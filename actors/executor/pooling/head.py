"""From pooled hidden states to the numbers that clients get: embeddings or the logits of labels, in float32."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.model.pooling.pooler import Pooler


class PooledHead:
    """The products of a :class:`Pooler`. ``tokens`` [V, H] are the rows of the head of tokens, of which a pooler may
    compare two."""

    def __init__(self, pooler: Pooler, hidden_size: int, parameters: Parameters, tokens: torch.Tensor | None) -> None:
        self._between, self._tokens = pooler.between, tokens
        widths = [hidden_size, *(product.width for product in pooler.head)]
        self._products = [
            (
                parameters.matrix({f"{product.name}.weight": outputs}, inputs),
                parameters.bias({f"{product.name}.bias": outputs}) if product.bias else None,
                product.act,
            )
            for product, (inputs, outputs) in zip(pooler.head, pairwise(widths), strict=True)
        ]

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """pooled [p, H] float32 -> [p, numbers] float32."""
        if self._between is not None:
            assert self._tokens is not None
            first, second = self._between
            return F.linear(pooled, (self._tokens[second].float() - self._tokens[first].float()).unsqueeze(0))
        for weight, bias, act in self._products:
            pooled = F.linear(pooled, weight.float(), None if bias is None else bias.float())
            pooled = pooled.tanh() if act == "tanh" else pooled
        return pooled


class NoHead:
    """Of a model that generates nothing: its requests end with a token that nobody reads."""

    NUMBERS = 32
    """Logits per row; kernels take no fewer gladly."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> zeros float32 [R, few]."""
        return torch.zeros(len(hidden), self.NUMBERS, dtype=torch.float32, device=hidden.device)
