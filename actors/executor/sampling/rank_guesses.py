"""Drafts over ranks, each of which has the logits of a range of the tokens: all tell each other their likeliest.

So all have the same drafts, whatever each has computed: they choose from the same bytes. Whether ranks are at the same
step is compared where that step samples.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.model.shards.shard import Shard


def with_guesses(ops: Ops, shard: Shard) -> Ops:
    """``ops`` whose guesses take logits of the rank's range of the tokens that a drafter knows. ``ops`` know the other
    ranks."""
    return replace(ops, store_guesses=RankGuesses(ops, shard).store_guesses)


class RankGuesses:
    """``ops`` are those for what all ranks have told."""

    def __init__(self, ops: Ops, shard: Shard) -> None:
        self._ops, self._shard = ops, shard

    def store_guesses(
        self, logits: torch.Tensor, token_ids: torch.Tensor | None, following: torch.Tensor, tokens: torch.Tensor,
        slots: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, features: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `store_guesses_reference`, from this rank's logits [R, W]; ``token_ids`` [V] are of all ranks."""
        known = self._shard.whole.vocab if token_ids is None else len(token_ids)
        told = self._ops.comm.all_gather(self._ops.part_guesses(logits, self._shard.of(known).start))
        self._ops.store_guesses(told, token_ids, following, tokens, slots, starts, ends, features)
