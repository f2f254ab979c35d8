"""Drafts of a head: it follows each step, and guesses where the next one verifies.

Behind a step (:meth:`HeadDrafts.follow`) the head stores keys and values of all positions that the step has computed,
whose next tokens are known by then, and keeps the feature of the last accepted one. So its part of the cache is whole
whether it drafts or not, and blocks that are found, swapped or copied serve it too. (A small model computes these
positions beside the step's own pass: :meth:`HeadDrafts.accompany`.) It guesses at the beginning of a step
(:meth:`HeadDrafts.draft`): there the host has said which rows verify how many drafts, and given them the blocks. Rows
that verify none cost it no pass.

All that it computes is in :meth:`HeadDrafts.run`, over memory at fixed addresses: from CUDA graphs, if there are any,
otherwise launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.batch.upload import Header
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.graphs.head_passes import Follow, Guess, HeadPass, follow_of
from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.executor.models.draft_head import DraftHead
from pagebus.actors.executor.step.pass_inputs import PassInputs


class HeadDrafts:
    """``hidden`` [tokens of a step, read_size]: what is read of the model in each pass. ``features`` [S, F]: that of
    the last position that each slot's sequence has computed. ``kv_cache`` is the head's part of the blocks.
    ``lengths`` [S] are as of :class:`~pagebus.actors.executor.step.drafting.Drafting`."""

    def __init__(
        self, head: DraftHead, model: Decoder, ops: Ops, state: DeviceBatch, header: Header, lengths: torch.Tensor,
        limits: BatchLimits,
    ) -> None:  # fmt: skip
        self.head = head
        self.kv_cache: torch.Tensor | None = None
        self._ops, self._state, self._header, self._lengths = ops, state, header, lengths
        self._dummy_slot = limits.dummy_slot
        device, dtype = lengths.device, model.parameters.dtype
        self.hidden = torch.zeros(limits.most_tokens, head.read_size, dtype=dtype, device=device)
        head.tap(model, self.hidden)
        self.features = torch.zeros(len(lengths), head.feature_size, dtype=dtype, device=device)
        self._inputs = PassInputs(ops, limits, device, num_tables=1)
        self._chain = _Chain(limits, head, dtype, device)

    def use(self, kv_cache: torch.Tensor | None) -> None:
        """Go on with this part of the cache."""
        self.kv_cache = kv_cache

    def draft(self, work: StepWork, graphs: Graphs | None) -> None:
        """Guess for the rows of the step that verify drafts, and store the drafts behind their tokens."""
        assert work.runs is not None
        widths, header = np.diff(work.runs.starts), self._header
        drafted = np.flatnonzero(widths > 1)  # decodes are before them; none has fewer samples than tokens
        if not len(drafted):
            return
        first, end, most = int(drafted[0]), int(drafted[-1]) + 1, int(widths.max()) - 1
        slots, query_start = header.slots[first:end], header.query_start[first : end + 1]
        wanted = None if graphs is None else graphs.guess(len(slots))
        if wanted is None:
            wanted, graphs = Guess(len(slots)), None
        chain = self._chain.of(wanted.rows)
        self._ops.begin_chain(
            slots, query_start, self._lengths, self.features, self.head.lag, self._dummy_slot, *chain
        )  # fmt: skip
        for _ in range(most):
            self._launch(wanted, graphs)

    def accompany(self, tokens: Tokens, batch: AttentionBatch, pause: Callable[[], object]) -> None:
        """Have the head compute the tokens of a pass of the model too, if it has to."""
        assert self.kv_cache is not None
        self.head.accompany(tokens, self.kv_cache, batch, pause)

    @property
    def follows(self) -> bool:
        """Whether it computes anything behind a step: what accompanies the step does not."""
        return self.head.feature_size > 0

    def follow(self, work: StepWork, bucket: Bucket | None, graphs: Graphs | None) -> None:
        """Store keys and values of the step's tokens behind its sampling, and keep the feature of each row's last
        accepted one. ``bucket``: what the step was padded to."""
        if not self.follows:
            return
        if bucket is None:
            self.run(Follow(len(work.slots), work.num_tokens))
        else:
            self._launch(follow_of(bucket), graphs)

    def _launch(self, wanted: HeadPass, graphs: Graphs | None) -> None:
        if graphs is None or not graphs.run_head(wanted):
            self.run(wanted)

    def run(self, wanted: HeadPass) -> None:
        """What a graph holds."""
        if isinstance(wanted, Guess):
            self._guess(wanted.rows)
        elif self.follows:
            self._follow(wanted.rows, wanted.tokens)

    def _guess(self, rows: int) -> None:
        """The next draft of each sequence of the chain."""
        chain, state = self._chain, self._state
        slots, starts, ends = chain.slots[:rows], chain.starts[:rows], chain.ends[:rows]
        counts, features = chain.counts[: rows + 1], chain.features[:rows]
        tokens = self._prepare(slots, starts, counts, rows)
        assert tokens.slot_mapping is not None
        batch = AttentionBatch(
            slots=slots,
            query_start=counts,
            context_lens=self._inputs.context_lens[:rows],
            slot_mapping=tokens.slot_mapping,
            block_tables=state.block_tables,
            num_decodes=rows,
        )
        logits, following = self.head(tokens.ids, tokens.positions, features, tokens.kv_cache, batch)
        behind = state.tokens[:, self.head.lag + 1 :]
        self._ops.store_guesses(logits, self.head.token_ids, following, behind, slots, starts, ends, features)

    def _follow(self, rows: int, num_tokens: int) -> None:
        """The step's own tokens; rows behind its last one have none."""
        header, query_start = self._header, self._header.query_start[: rows + 1]
        slots, starts = header.slots[:rows], header.starts[:rows]
        features = self.head.features(self.hidden[:num_tokens])
        self.head.cache(self._prepare(slots, starts, query_start, num_tokens), features)
        self._ops.keep_features(features, slots, starts, query_start, self._lengths, self.features)

    def _prepare(
        self, slots: torch.Tensor, starts: torch.Tensor, query_start: torch.Tensor, num_tokens: int
    ) -> Tokens:  # fmt: skip
        """The tokens of a pass of the head. Their ids are those that it reads there."""
        assert self.kv_cache is not None
        token_table, block_tables = self._state.tokens[:, self.head.lag :], self._state.all_tables[:1]
        self._inputs.prepare(num_tokens, token_table, block_tables, slots, starts, query_start)
        return self._inputs.tokens(num_tokens, self.kv_cache)


class _Chain:
    """From one guess to the next: the ``slots`` [R] of the sequences, the position that is read now, ``starts`` [R]
    (negative in rows of nothing), the last one that has a block, ``ends`` [R], and ``features`` [R, F] of the former.
    ``counts`` are 0, 1, ... R."""

    def __init__(self, limits: BatchLimits, head: DraftHead, dtype: torch.dtype, device: torch.device) -> None:
        most = limits.max_num_seqs
        self._rows = torch.tensor([[limits.dummy_slot], [-1], [-1]], dtype=torch.int32, device=device).repeat(1, most)
        self.slots, self.starts, self.ends = self._rows
        self.features = torch.zeros(most, head.feature_size, dtype=dtype, device=device)
        self.counts = torch.arange(most + 1, dtype=torch.int32, device=device)

    def of(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What so many sequences begin in: slots, starts and ends [3, rows], and features. A sequence with fewer drafts
        than others goes on behind its own, where it has a block, and where the step itself will write."""
        return self._rows[:, :rows], self.features[:rows]
