"""What rows of a step asked for besides tokens, device side: log probabilities, and sums of prompts' hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from actors.executor.device_batch import DeviceBatch
from actors.executor.models import Model
from actors.executor.ops import Ops
from actors.executor.scoring import Scoring

MIN_PROMPT_ROWS = 64
MAX_PROMPT_ROWS = 256


@dataclass(slots=True)
class Scores:
    """Packed rows (see :mod:`actors.executor.scoring`) of one step, on the device, and sums of states [p, H] float32;
    None where nothing was asked."""

    sampled: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    pooled: torch.Tensor | None = None

    def to_pinned(self) -> Scores:
        """Queue copies to the host; they are done when the stream has come to them."""
        return Scores(_pinned(self.sampled), _pinned(self.prompts), _pinned(self.pooled))

    def give(self, scoring: Scoring) -> None:
        """Hand on rows that are on the host."""
        scoring.packed = None if self.sampled is None else self.sampled.numpy()
        scoring.packed_prompts = None if self.prompts is None else self.prompts.numpy()
        scoring.packed_pooled = None if self.pooled is None else self.pooled.numpy().view(np.int32)


def _pinned(rows: torch.Tensor | None) -> torch.Tensor | None:
    if rows is None:
        return None
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)


class Scorer:
    """Computes what a :class:`Scoring` asks for. The logits it reads are the model's own, and stay as they are."""

    def __init__(self, ops: Ops, state: DeviceBatch, max_num_seqs: int) -> None:
        self._ops = ops
        self._state = state
        # No more logits at once than a step of full decodes has, so that memory was measured for them.
        self._prompt_rows = min(max(max_num_seqs, MIN_PROMPT_ROWS), MAX_PROMPT_ROWS)

    def sampled(self, scoring: Scoring, rows: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Packed rows [m, 2 + 2k] of ``rows`` [m] of ``logits`` [>= N, V] and the sampled ``tokens`` [>= N]."""
        if len(rows) == len(logits):
            chosen = tokens[: len(rows)]
        else:
            logits, chosen = logits.index_select(0, rows), tokens.index_select(0, rows)
        packed: torch.Tensor = self._ops.token_logprobs(logits, chosen, scoring.num_top)
        return packed

    def prompts(
        self,
        scoring: Scoring,
        hidden_index: torch.Tensor,
        token_index: torch.Tensor,
        hidden: torch.Tensor,
        model: Model,
    ) -> torch.Tensor:
        """Packed rows [Q, 2 + 2k]: token ``token_index[i]`` of the token table after state ``hidden_index[i]`` of
        ``hidden`` [T, H]. In pieces, because logits of a whole prompt may be gigabytes."""
        tokens = self._state.tokens.view(-1).index_select(0, token_index)
        pieces = []
        for start in range(0, len(tokens), self._prompt_rows):
            piece = slice(start, start + self._prompt_rows)
            logits = model.logits(hidden.index_select(0, hidden_index[piece]))
            pieces.append(self._ops.token_logprobs(logits, tokens[piece], scoring.prompt_num_top))
        return torch.cat(pieces)


def pool(scoring: Scoring, hidden: torch.Tensor) -> torch.Tensor:
    """Sums [p, H] float32 over the pooled parts of ``hidden`` [T, H]: one launch per prompt, and always in the same
    order."""
    parts = zip(scoring.pooled_rows.tolist(), scoring.pooled_lengths.tolist(), strict=True)
    return torch.stack([hidden[row : row + length].sum(0, dtype=torch.float32) for row, length in parts])
