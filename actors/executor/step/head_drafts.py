"""Drafts of a head: it follows each step, and guesses where the next one verifies.

Behind a step (:meth:`HeadDrafts.follow`) the head stores keys and values of all positions that the step has computed,
whose next tokens are known by then, and keeps the feature of the last accepted one. So its part of the cache is whole
whether it drafts or not, and blocks that are found, swapped or copied serve it too. (A small model computes these
positions beside the step's own pass: :meth:`HeadDrafts.accompany`.) It guesses at the beginning of a step
(:meth:`HeadDrafts.draft`): there the host has said which rows verify how many drafts, and given them the blocks. Rows
that verify none cost it no pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.batch.upload import Header
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.executor.models.draft_head import DraftHead


class HeadDrafts:
    """``hidden`` [tokens of a step, read_size]: what is read of the model in each pass. ``features`` [S, F]: that of
    the last position that each slot's sequence has computed. ``kv_cache`` is the head's part of the blocks. Each pass
    of the model leaves its ``positions`` and its ``slot_mapping`` in the first T places of these."""

    def __init__(
        self, head: DraftHead, model: Decoder, ops: Ops, state: DeviceBatch, limits: BatchLimits,
        positions: torch.Tensor, slot_mapping: torch.Tensor,
    ) -> None:  # fmt: skip
        self.head, self._positions, self._slot_mapping = head, positions, slot_mapping
        self.kv_cache: torch.Tensor | None = None
        self._ops, self._state, self._block_size = ops, state, limits.block_size
        device, dtype = state.tokens.device, model.parameters.dtype
        self.hidden = torch.zeros(len(positions), head.read_size, dtype=dtype, device=device)
        head.tap(model, self.hidden)
        self.features = torch.zeros(limits.layout.num_slots, head.feature_size, dtype=dtype, device=device)
        self._counts = torch.arange(limits.max_num_seqs + 1, dtype=torch.int32, device=device)

    def draft(self, work: StepWork, header: Header, lengths: torch.Tensor) -> None:
        """Guess for the rows of the step that verify drafts, of sequences of ``lengths`` [S], and store the drafts
        behind their tokens."""
        assert work.runs is not None
        assert self.kv_cache is not None
        widths = np.diff(work.runs.starts)
        drafted = np.flatnonzero(widths > 1)  # decodes are before them; none has fewer samples than tokens
        if not len(drafted):
            return
        first, end, most = int(drafted[0]), int(drafted[-1]) + 1, int(widths.max()) - 1
        slots, drafts = header.slots[first:end], header.query_start[first : end + 1].diff() - 1
        rows, lag = slots.long(), self.head.lag
        features, length = self.features[rows], lengths[rows]
        for place in range(most):
            # A row with fewer drafts goes on behind them, where it has a block, and the step itself will write.
            positions = (length - 1 - lag + (drafts + lag).clamp(max=place)).clamp_(min=0)
            ids = self._state.tokens[rows, positions.long() + lag]
            guess, features = self.head(ids, positions, features, self.kv_cache, self._rows(slots, positions))
            where = torch.where(drafts > place, length + place, -1)
            self._ops.store_sampled(self._state.tokens, slots, where, guess)

    def accompany(self, tokens: Tokens, batch: AttentionBatch, pause: Callable[[], object]) -> None:
        """Have the head compute the tokens of a pass of the model too, if it has to."""
        assert self.kv_cache is not None
        self.head.accompany(tokens, self.kv_cache, batch, pause)

    def follow(self, work: StepWork, header: Header) -> torch.Tensor:
        """Store keys and values of the step's tokens, behind its sampling. Returns the features of all [T, H]."""
        assert self.kv_cache is not None
        count, num_rows = work.num_tokens, len(work.slots)
        if not self.head.feature_size:  # it has been computed beside the pass
            return self.hidden[:count]
        lens = header.query_start[: num_rows + 1].diff()
        rows = torch.repeat_interleave(header.slots[:num_rows].long(), lens.long(), output_size=count)
        positions = self._positions[:count]
        ids = self._state.tokens[rows, positions.long() + 1]
        features = self.head.features(self.hidden[:count])
        self.head.cache(Tokens(ids, positions, self._slot_mapping[:count], self.kv_cache), features)
        return features

    def keep(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Keep the ``features`` [M, H] of the last positions of the sequences in ``slots`` [M]."""
        self.features[slots.long()] = features

    def _rows(self, slots: torch.Tensor, positions: torch.Tensor) -> AttentionBatch:
        """A pass of one position of each sequence."""
        count, places = len(slots), positions.long()
        blocks = self._state.block_tables[slots.long(), places // self._block_size].long()
        return AttentionBatch(
            slots=slots,
            query_start=self._counts[: count + 1],
            context_lens=positions + 1,
            slot_mapping=blocks * self._block_size + places % self._block_size,
            block_tables=self._state.block_tables,
            num_decodes=count,
        )
