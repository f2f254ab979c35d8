"""What drafts read of a head, whichever it is: one layer that goes on from the model's hidden states."""

from __future__ import annotations

from typing import Protocol

import torch

from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.models.decoder import Decoder


class DraftHead(Protocol):
    """At position p a head reads the feature of p, which follows from the model's hidden states there, and the token at
    p + 1. From both it makes the feature that it expects at p + 1, and the token at p + 2.

    ``read_size``: numbers that are read of the model for each token; ``feature_size``: numbers of a feature.

    All but :meth:`tap` may be captured in CUDA graphs, by another thread. So they launch the same kernels whatever the
    tensors hold, wait for nothing, and keep nothing between calls. Rows that are padding have a ``slot_mapping`` below
    0 and a context of no tokens: what they get is not read.
    """

    @property
    def read_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    def tap(self, model: Decoder, hidden: torch.Tensor) -> None:
        """Have each pass of ``model`` copy what the head reads to the first T rows of ``hidden`` [>= T, read_size]."""

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What was read of the model [T, read_size] -> features [T, feature_size]."""
        ...

    def cache(self, tokens: Tokens, features: torch.Tensor) -> None:
        """Store keys and values of positions with these ``features`` [T, F], where ``tokens`` are those behind them."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, kv_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """One position of each of R sequences: its ``features`` [R, F] and the ``ids`` [R] behind it -> the likeliest
        token after that [R] int32, and its feature [R, F]. May overwrite ``features``."""
        ...
