"""What drafts read of a head, whichever it is: a layer that goes on from the model's hidden states, or a whole small
model beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.models.decoder import Decoder


class DraftHead(Protocol):
    """At position p a head reads the feature of p, which follows from the model's hidden states there, and the token at
    p + 1. From both it makes the feature that it expects at p + 1, and the token at p + 2.

    ``read_size``: numbers that are read of the model for each token; ``feature_size``: numbers of a feature. ``lag``:
    by how many positions a head is behind the token that it reads, 1. A whole model reads the token of its position:
    there it is 0, and features have no numbers.

    All but :meth:`tap` may be captured in CUDA graphs, by another thread. So they launch the same kernels whatever the
    tensors hold, wait for nothing, and keep nothing between calls. Rows that are padding have a ``slot_mapping`` below
    0 and a context of no tokens: what they get is not read.
    """

    @property
    def lag(self) -> int: ...

    @property
    def read_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def token_ids(self) -> torch.Tensor | None:
        """Which tokens its logits are of [V'] int32; None: all there are."""
        ...

    def tap(self, model: Decoder, hidden: torch.Tensor) -> None:
        """Have each pass of ``model`` copy what the head reads to the first T rows of ``hidden`` [>= T, read_size]."""

    def accompany(
        self, tokens: Tokens, kv_cache: torch.Tensor, batch: AttentionBatch, pause: Callable[[], object]
    ) -> None:
        """Compute the ``tokens`` of a pass of the model too, into ``kv_cache``. A head whose keys follow from features
        does nothing here. ``pause`` is called before each layer."""

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What was read of the model [T, read_size] -> features [T, feature_size]."""
        ...

    def cache(self, tokens: Tokens, features: torch.Tensor) -> None:
        """Store keys and values of positions with these ``features`` [T, F], where ``tokens`` are those behind them."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, kv_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """One position of each of R sequences: its ``features`` [R, F] and the ``ids`` [R] of the tokens that it reads
        -> logits [R, V'] float32 of the token after that, and its feature [R, F]. May overwrite ``features``."""
        ...
