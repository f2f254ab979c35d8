"""Log probabilities of a step, device side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.logprob_rows import MAX_TOP, LogprobRows
from pagebus.actors.executor.device.ops import Ops

MIN_PROMPT_ROWS = 64
MAX_PROMPT_ROWS = 256
SORTED_ROWS = 8
"""A sort takes some 40 bytes of memory per logit."""


@dataclass(slots=True)
class Scores:
    """Packed rows (see :mod:`pagebus.actors.executor.batch.logprob_rows`) of one step, on the device, and sums of
    states [p, H] float32; None where nothing was asked."""

    sampled: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    picked: torch.Tensor | None = None
    """Log probabilities [K] float32 of the tokens that rows have picked."""

    def to_pinned(self) -> Scores:
        """Queue copies to the host; they are done when the stream has come to them."""
        return Scores(*map(_pinned, (self.sampled, self.prompts, self.pooled, self.picked)))

    def keep_samples(self, sampled: torch.Tensor, picked: torch.Tensor | None) -> None:
        """Keep rows of the sampled tokens, and log probabilities of the tokens that some of them have picked."""
        self.sampled, self.picked = sampled, picked

    def keep_prompts(self, prompts: torch.Tensor) -> None:
        """Keep rows of positions of prompts."""
        self.prompts = prompts

    def keep_pooled(self, pooled: torch.Tensor) -> None:
        """Keep sums of states."""
        self.pooled = pooled

    def give(self, requested: LogprobRows) -> None:
        """Hand on rows that are on the host."""
        requested.arrived(
            packed=None if self.sampled is None else self.sampled.numpy(),
            packed_prompts=None if self.prompts is None else self.prompts.numpy(),
            packed_pooled=None if self.pooled is None else self.pooled.numpy().view(np.int32),
            packed_picked=None if self.picked is None else self.picked.numpy().view(np.int32),
        )


def _pinned(rows: torch.Tensor | None) -> torch.Tensor | None:
    if rows is None:
        return None
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)


class LogprobComputer:
    """Computes what a :class:`LogprobRows` asks for. The logits it reads are the model's own, and stay as they are."""

    def __init__(self, ops: Ops, state: DeviceBatch, max_num_seqs: int) -> None:
        self._ops = ops
        self._state = state
        # No more logits at once than a step of full decodes has, so that memory was measured for them.
        self._prompt_rows = min(max(max_num_seqs, MIN_PROMPT_ROWS), MAX_PROMPT_ROWS)

    def sampled(
        self, requested: LogprobRows, deltas: Mapping[str, torch.Tensor], logits: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed rows [m, 2 + 2k] of the rows ``deltas["score_rows"]`` [m] of ``logits`` [>= N, V] and the sampled
        ``tokens`` [>= N]; and the log probabilities [K] of tokens that were picked, None if none were."""
        rows = deltas["score_rows"]
        if len(rows) == len(logits):
            chosen = tokens[: len(rows)]
        else:
            logits, chosen = logits.index_select(0, rows), tokens.index_select(0, rows)
        packed = self._logprobs(logits, chosen, requested.num_top)
        if "picked_ids" not in deltas:
            return packed, None
        return packed, self._picked(logits, packed, deltas["picked_rows"], deltas["picked_ids"])

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """Packed rows; with more alternatives than the kernel finds a few rows at a time are sorted."""
        if num_top <= MAX_TOP:
            return self._ops.token_logprobs(logits, tokens, num_top)
        starts = range(0, len(logits), SORTED_ROWS)
        pieces = [slice(start, start + SORTED_ROWS) for start in starts]
        return torch.cat([self._ops.sorted_logprobs(logits[piece], tokens[piece], num_top) for piece in pieces])

    def _picked(
        self, logits: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Log probabilities [K] of ``ids`` [K] in ``rows`` [K] of ``logits`` [m, V]. The ``packed`` rows [m, 2 + 2k], k
        at least 1, tell the most likely token's, from which the others differ by their logits; NaN counts as -inf."""
        num_top = (packed.shape[1] - 2) // 2
        rows = rows.long()
        likeliest = packed[:, 2].long()[rows]
        best = packed[:, 2 + num_top].view(torch.float32)[rows]
        own, most = self._ops.pick_logits(logits, rows.repeat(2), torch.cat([ids.long(), likeliest])).chunk(2)
        found = own - most + best
        return torch.where(found == found, found, -torch.inf)

    def prompts(
        self,
        requested: LogprobRows,
        hidden_index: torch.Tensor,
        token_index: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Packed rows [Q, 2 + 2k]: token ``token_index[i]`` of the token table after state ``hidden_index[i]``, whose
        logits ``logits_of`` gives. In pieces, because logits of a whole prompt may be gigabytes."""
        tokens = self._state.tokens.view(-1).index_select(0, token_index)
        pieces = []
        for start in range(0, len(tokens), self._prompt_rows):
            piece = slice(start, start + self._prompt_rows)
            pieces.append(self._logprobs(logits_of(hidden_index[piece]), tokens[piece], requested.prompt_num_top))
        return torch.cat(pieces)
