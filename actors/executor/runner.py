"""Runs steps on the device: one upload, the deltas, the forward pass, sampling. Nothing here waits for the device."""

from __future__ import annotations

import torch

from actors.executor.batch import BatchLimits, StepWork
from actors.executor.device_batch import DeviceBatch
from actors.executor.graphs import DecodeGraphs
from actors.executor.models import AttentionBatch, Model
from actors.executor.ops import Ops
from actors.executor.sampler import Sampler
from actors.executor.scorer import Scorer, Scores
from actors.executor.upload import Uploader, tail_capacity


class Runner:
    """Model, caches and device state of one executor. All methods belong to the device thread."""

    def __init__(
        self, model: Model, ops: Ops, limits: BatchLimits, device: torch.device, kv_cache: torch.Tensor, depth: int
    ) -> None:
        self.model = model
        self.limits = limits
        self.kv_cache = kv_cache
        self.graphs: DecodeGraphs | None = None
        self.state = DeviceBatch(limits, device)
        self._ops = ops
        self._sampler = Sampler(ops, self.state)
        self._scorer = Scorer(ops, self.state, limits.max_num_seqs)
        self.scores: Scores | None = None
        """Log probabilities of the last step, if any of its rows asked for them."""
        tail_ints = tail_capacity(limits.max_num_seqs, limits.max_num_batched_tokens)
        self.uploader = Uploader(device, limits.max_num_seqs, tail_ints, depth + 2)
        most_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self._input_ids = torch.zeros(most_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most_tokens, dtype=torch.int32, device=device)
        self._slot_mapping = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)

    def run(self, work: StepWork) -> torch.Tensor | None:
        """Launch one step; returns its sampled tokens [>= N] int32 on the device, None if no row samples."""
        num_rows = len(work.slots)
        self.scores = None if work.scoring is None else Scores()
        bucket = self.graphs.bucket(num_rows) if self.graphs is not None and work.decode_only else 0
        deltas = self.uploader.send(work, bucket)
        self.state.apply(deltas)
        if "copy_sources" in deltas:
            self._ops.copy_blocks(self.kv_cache, deltas["copy_sources"], deltas["copy_targets"])
        if not num_rows:
            return None
        if self.graphs is not None and bucket:
            logits, sampled = self.graphs.replay(bucket)
        else:
            hidden = self.forward(work)
            self._score_prompts(work, hidden, deltas)
            if not len(work.positions):
                return None
            logits, sampled = self._eager_tokens(work, hidden, deltas)
        if "extra_rows" in deltas:
            self._resample(work, deltas, logits, sampled)
        if "score_rows" in deltas:
            assert work.scoring is not None
            assert self.scores is not None
            self.scores.sampled = self._scorer.sampled(work.scoring, deltas["score_rows"], logits, sampled)
        return sampled

    def forward(self, work: StepWork, *, padded_rows: int = 0) -> torch.Tensor:
        """Inputs from the slots, then the model: hidden states [T, H]. While a graph is captured, ``padded_rows`` is
        the number of rows and tokens, and nothing of ``work`` but its maxima is used."""
        header, state = self.uploader.header, self.state
        num_rows = padded_rows or len(work.slots)
        num_tokens = padded_rows or work.num_tokens
        slots, query_start = header.slots[:num_rows], header.query_start[: num_rows + 1]
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        slot_mapping, context_lens = self._slot_mapping[:num_tokens], self._context_lens[:num_rows]
        self._ops.prepare_inputs(
            state.tokens,
            state.block_tables,
            slots,
            header.starts[:num_rows],
            query_start,
            self.limits.block_size,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            context_lens=context_lens,
        )
        batch = AttentionBatch(
            slots=slots,
            query_start=query_start,
            context_lens=context_lens,
            slot_mapping=slot_mapping,
            block_tables=state.block_tables,
            max_query_len=work.max_query_len,
            max_context_len=work.max_context_len,
            num_decodes=padded_rows or work.num_decodes,
        )
        return self.model.forward(input_ids, positions, self.kv_cache, batch)

    def sample_plainly(self, logits: torch.Tensor, slots: torch.Tensor, *, any_random: bool) -> torch.Tensor:
        """Tokens [N] int32 of ``logits`` [N, V], stored as the next tokens of ``slots`` [N]."""
        header, count = self.uploader.header, len(logits)
        sampled = self._sampler.plain(logits, slots, header.indexes[:count], any_random=any_random)
        self._ops.store_sampled(self.state.tokens, slots, header.positions[:count], sampled)
        return sampled

    def _score_prompts(self, work: StepWork, hidden: torch.Tensor, deltas: dict[str, torch.Tensor]) -> None:
        if "prompt_hidden" in deltas:
            assert work.scoring is not None
            assert self.scores is not None
            index, tokens = deltas["prompt_hidden"], deltas["prompt_index"]
            self.scores.prompts = self._scorer.prompts(work.scoring, index, tokens, hidden, self.model)

    def _sample_slots(self, work: StepWork, deltas: dict[str, torch.Tensor]) -> torch.Tensor:
        return deltas.get("sample_slots", self.uploader.header.slots[: len(work.slots)])

    def _eager_tokens(
        self, work: StepWork, hidden: torch.Tensor, deltas: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V] of the rows that sample, and their tokens [N]."""
        if "hidden_index" in deltas:
            hidden = hidden.index_select(0, deltas["hidden_index"])
        logits = self.model.logits(hidden)
        if len(deltas.get("extra_rows", ())) == len(logits):  # every row will be sampled again
            return logits, torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        return logits, self.sample_plainly(logits, self._sample_slots(work, deltas), any_random=work.any_random)

    def _resample(
        self, work: StepWork, deltas: dict[str, torch.Tensor], logits: torch.Tensor, sampled: torch.Tensor
    ) -> None:
        """Replace the tokens of the extra rows, in ``sampled`` and in the token store."""
        header, rows = self.uploader.header, deltas["extra_rows"]
        slots = self._sample_slots(work, deltas)
        tokens = self._sampler.extras(work, rows, logits, slots, header.indexes)
        sampled[rows.long()] = tokens
        self._ops.store_sampled(
            self.state.tokens, slots.index_select(0, rows), header.positions.index_select(0, rows), tokens
        )
