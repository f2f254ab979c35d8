"""Embedding and head of a rank, which has a range of the vocabulary."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.embedding import Embedding, Head
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.spec import HeadSpec


def embedding_of(
    config: ModelConfig, parameters: Parameters, ops: Ops, name: str = "model.embed_tokens"
) -> Embedding:  # fmt: skip
    """The model's, or its rank's part; of a stage that begins with hidden states, its shape alone."""
    spec = config.spec
    if config.stage is not None and not config.stage.embeds:
        rows = spec.vocab if config.shard is None else len(config.shard.of(spec.vocab))
        return Embedding(Parameters(torch.device("meta"), parameters.dtype), name, rows, spec.hidden, ops)
    if config.shard is None:
        return Embedding(parameters, name, spec.vocab, spec.hidden, ops, spec.embed_scale)
    return PartEmbedding(parameters, name, config.shard.of(spec.vocab), spec.hidden, ops, spec.embed_scale)


def head_of(
    config: ModelConfig, parameters: Parameters, embedding: Embedding, ops: Ops, name: str = "lm_head"
) -> Head:  # fmt: skip
    """The model's, or its rank's part."""
    if config.shard is None:
        return Head(parameters, name, embedding, ops, config.spec.head)
    return PartHead(parameters, name, embedding, ops, config.spec.head, config.shard.of(config.spec.vocab))


class PartEmbedding(Embedding):
    """The rows ``own`` of the matrix. A token's row is the sum over ranks: the others have zeros."""

    def __init__(
        self, parameters: Parameters, name: str, own: range, hidden_size: int, ops: Ops, scale: float = 1.0
    ) -> None:
        super().__init__(parameters, name, len(own), hidden_size, ops, scale)
        self._own = own

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] integers inside the vocabulary -> [T, H], a new tensor."""
        places = input_ids - self._own.start
        missing = (places < 0) | (places >= len(self._own))
        rows = self._ops.embedding(places.masked_fill(missing, 0), self.weight, self.scale)
        rows = self._ops.comm.all_reduce(rows.masked_fill_(missing.unsqueeze(1), 0.0))
        return self._with_adapters(input_ids, rows)


class PartHead(Head):
    """Logits over the rank's range of the vocabulary."""

    def __init__(
        self, parameters: Parameters, name: str, embedding: Embedding, ops: Ops, spec: HeadSpec, own: range
    ) -> None:
        super().__init__(parameters, name, embedding, ops, spec)
        self.own = own
