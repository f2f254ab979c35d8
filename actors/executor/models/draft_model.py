"""A small model that drafts for a large one: it reads the same tokens, and says the likeliest next one.

It needs nothing of the large model, so beside each of its passes it computes the same tokens into its own part of the
same blocks. What has been found, swapped in or copied there is then its own past too.

https://arxiv.org/abs/2211.17192, without its rejection sampling: drafts are the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.models.decoder import Decoder


class DraftModel:
    """A :class:`~pagebus.actors.executor.models.draft_head.DraftHead` without features. All layers of ``model`` lie in
    the first page of a block."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    @property
    def lag(self) -> int:
        return 0

    @property
    def read_size(self) -> int:
        return 0

    @property
    def feature_size(self) -> int:
        return 0

    @property
    def token_ids(self) -> None:
        """Its logits are of all tokens."""

    def tap(self, model: Decoder, hidden: torch.Tensor) -> None:
        """Nothing is read of the model."""

    def accompany(
        self, tokens: Tokens, kv_cache: torch.Tensor, batch: AttentionBatch, pause: Callable[[], object]
    ) -> None:
        self.model.cache(tokens.ids, tokens.positions, kv_cache, batch, pause)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def cache(self, tokens: Tokens, features: torch.Tensor) -> None:
        """All is stored beside the pass."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, kv_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        hidden = self.model.forward(ids, positions, kv_cache, batch)
        return self.model.logits(hidden), features
