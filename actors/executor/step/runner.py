"""Runs steps on the device: one upload, the deltas, the forward pass, sampling. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from pagebus.actors.executor.batch.buckets import Bucket, Buckets
from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.runs import TOLD
from pagebus.actors.executor.batch.step_work import Extras, StepWork, prefill_rows
from pagebus.actors.executor.batch.upload import Uploader, tail_capacity
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.graphs.piecewise_graphs import Pieces
from pagebus.actors.executor.graphs.resampling import resampling_of
from pagebus.actors.executor.layers.adapted.slots import AdapterSlots, logits_at, sampled
from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.attention_batch import LastTokens
from pagebus.actors.executor.memory.kv_cache import Cache
from pagebus.actors.executor.models import AttentionBatch, Model, Tokens
from pagebus.actors.executor.models.decoder import as_decoder, gives_all
from pagebus.actors.executor.models.draft_head import DraftHead
from pagebus.actors.executor.pooling.parts import numbers_of_parts, pools_all_tokens
from pagebus.actors.executor.sampling.logprobs import LogprobComputer, Scores
from pagebus.actors.executor.sampling.sampler import Sampler
from pagebus.actors.executor.step.drafting import Drafting, Lookup
from pagebus.actors.executor.step.head_drafts import HeadDrafts
from pagebus.actors.executor.step.launch import Launch
from pagebus.actors.executor.step.pass_inputs import PassInputs
from pagebus.actors.executor.step.step_kernels import KernelChooser, StepKernels
from pagebus.kernels.attention.choice import StepRows
from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.paged_attention import Spans, graph_configs
from pagebus.kernels.attention.prefill_plan import QuerySpans, most_merges
from pagebus.kernels.common.target import num_multiprocessors

SelectLongRows = Callable[[tuple[LongRow, ...], bool], tuple[LongRow, ...]]
"""Which parts of prompts, perhaps beside decodes, the library computes, or our kernel for long prompts."""


class Runner:
    """The model, caches and device state of one executor. All methods belong to the device thread.

    Args:
        graph_tokens: the most tokens of a step that may run from a CUDA graph, 0 for none.
        pieces_tokens: the most tokens of a step that may run from piecewise graphs.
        cache: the blocks, and the model's part of them.
        lookup, head: what drafts are looked up by, if any are verified; and what drafts instead.
        adapters: which slots have which, if any may have one.
        decodes_apart: as in :class:`PersistentBatch`; if not, ``ops`` are the invariant ones, and the last layer
            computes all tokens, not only the sampled ones, which would be decodes.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        limits: BatchLimits,
        device: torch.device,
        cache: Cache,
        depth: int,
        graph_tokens: int = 0,
        *,
        pieces_tokens: int = 0,
        decodes_apart: bool = True,
        lookup: Lookup | None = None,
        head: DraftHead | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self.graphs: Graphs | None = None
        self.state = DeviceBatch(ops, limits, device)
        self._ops = ops
        self._decodes_apart = decodes_apart
        self._in_one_step = model.config.in_one_step
        self._pools = model.config.pooler is not None and not model.passes_on
        self._pools_all = pools_all_tokens(model.config)
        self._sampler = Sampler(ops, self.state)
        self._logprobs = LogprobComputer(ops, self.state, limits.max_num_seqs)
        self._fill_masks: Callable[[StepWork], torch.Tensor] = _no_masks
        self.select_long_rows: SelectLongRows = lambda rows, decodes: ()
        self.adapters = adapters
        self._adapted = False  # whether some row of the last step has an adapter
        self.scores: Scores | None = None
        """Log probabilities of the last step, if requested by any of its rows."""
        self.from_graph = False
        """Whether the last step ran from graphs, whole or piecewise."""
        self.kernels: StepKernels | None = None
        """Kernels of the last step; None if it had no rows."""
        self.chooser = KernelChooser(model.chooser, model.config, model.kinds)
        self._shape = attention_shape(model.config, model.parameters.dtype, cache.model.dtype, device)
        self._configs = graph_configs(self._shape, invariant=not decodes_apart)
        self.buckets = Buckets(
            limits.max_num_seqs, min(max(1, graph_tokens), limits.most_tokens), self._configs[False].block_queries,
            decodes_apart=decodes_apart, largest_pieces=min(pieces_tokens, limits.max_num_batched_tokens),
            max_samples=limits.padded_samples, max_verified=limits.verified_tokens, packs_few=True in self._configs,
        )  # fmt: skip
        self.uploader = self._make_uploader(device, depth)
        self.inputs = PassInputs(ops, limits, device, num_tables=1 + limits.windowed_pages)
        self.drafting: Drafting | None = None
        """Of an engine that speculates."""
        if limits.num_drafts and lookup is not None:
            self.drafting = Drafting(ops, self.state, self.uploader.header, limits, lookup, head, model)
        self.use(cache, limits)

    def _make_uploader(self, device: torch.device, depth: int) -> Uploader:
        """What sends the inputs of steps and buckets, of which ``depth`` are in flight."""
        limits, processors = self.limits, num_multiprocessors(device) if self._decodes_apart else 0
        shares = max(self._shape.shares(each, processors) for each in self._configs.values())
        most_spans = limits.most_tokens // self.buckets.block_queries + limits.max_num_seqs + shares
        return Uploader(
            device, limits.max_num_seqs, tail_capacity(limits.max_num_seqs, limits.max_num_batched_tokens), depth + 2,
            max_spans=max(most_spans, self.buckets.most_spans), max_merges=most_merges(shares),
            max_samples=limits.most_samples,
        )  # fmt: skip

    # -- what comes once there is memory for it ------------------------------------------------------------------------
    def use(self, cache: Cache, limits: BatchLimits) -> None:
        """Go on with this cache, and the limits that it sets."""
        self.limits, self.kv_cache, self.blocks = limits, cache.model, cache.blocks
        if self.drafting is not None:
            self.drafting.use(cache)

    def split_prompts(self, select: SelectLongRows) -> None:
        """Leave attention of the parts that ``select`` returns to the library, or to our kernel for long prompts."""
        self.select_long_rows = select

    def replay(self, graphs: Graphs) -> None:
        """Run steps from these graphs from now on."""
        self.graphs = graphs

    def mask_with(self, fill_masks: Callable[[StepWork], torch.Tensor]) -> None:
        """Constrain rows by the masks that ``fill_masks`` returns for a step, on the host; it may wait for the step
        before."""
        self._fill_masks = fill_masks

    # -- steps ---------------------------------------------------------------------------------------------------------
    @property
    def head(self) -> HeadDrafts | None:
        """What drafts in place of the lookup."""
        return None if self.drafting is None else self.drafting.head

    @property
    def most_results(self) -> int:
        """The most numbers that a step tells."""
        limits = self.limits
        return limits.most_samples + ((TOLD + limits.num_drafts) * limits.max_num_seqs if limits.num_drafts else 0)

    def run(self, work: StepWork) -> torch.Tensor | None:
        """Launch one step; returns its sampled tokens [>= N] int32 on the device, None if no row samples. Where drafts
        are verified more is told behind them: ``work.num_results`` numbers."""
        self.scores = None if work.logprob_rows is None or self.model.passes_on else Scores()
        self._adapted = self.adapters is not None and self.adapters.send(work.slots)
        launch = self.choose(work, self._bucket(work))
        bucket, self.kernels = launch.whole, launch.kernels
        self.from_graph = bucket is not None or launch.pieces is not None
        cut = None if work.decode_only or self._in_one_step else self._cut(work, bucket, launch.long_rows)
        deltas = self.uploader.send(work, bucket, cut)
        self.state.apply(deltas)
        if "copy_sources" in deltas:
            self._ops.copy_blocks(self.blocks, deltas["copy_sources"], deltas["copy_targets"])
        if not len(work.slots):
            return None
        if self.drafting is not None:
            if work.runs is not None and self.graphs is not None:
                work.runs.offer_once(self.graphs.can_verify)
            self.drafting.begin(work, deltas, self.graphs)
        replayed = None if self.graphs is None or bucket is None else self.graphs.run(bucket, self)
        hidden = self.forward(work, cut, launch) if replayed is None else replayed[0]
        if self.model.pass_on(hidden, work.num_tokens):
            return None
        self._score_prompts(work, hidden, deltas, pooled=self._pools and replayed is not None)
        if replayed is None and not len(work.positions):
            if self.drafting is not None:
                self.drafting.follow(work, bucket, self.graphs)
            return None
        logits, sampled = self._eager_tokens(work, hidden, deltas) if replayed is None else replayed[1:]
        if "extra_rows" in deltas:
            if self.drafting is not None:
                self.drafting.restore(work, deltas, self.inputs.input_ids)
            sampled = self._sample_again(work, bucket, deltas, logits, sampled)
        if "score_rows" in deltas:
            assert work.logprob_rows is not None
            assert self.scores is not None
            self.scores.keep_samples(*self._logprobs.sampled(work.logprob_rows, deltas, logits, sampled))
        if self.drafting is not None:
            return self.drafting.end(work, deltas, self.inputs.input_ids, sampled, bucket, self.graphs)
        return sampled

    def choose(self, work: StepWork, bucket: Bucket | None) -> Launch:
        """Choose how a step padded to ``bucket`` runs."""
        whole, pieces = (None, bucket) if bucket is not None and bucket.pieces else (bucket, None)
        if whole is not None:
            rows = StepRows(whole.most_decodes, whole.spans > 0, whole=not whole.spans, runs=whole.runs)
            return Launch(whole, None, (), rows, self.chooser.choose(rows, whole.tokens, whole.rows))
        long_rows = () if work.decode_only else self.select_long_rows(prefill_rows(work), work.num_decodes > 0)
        tokens = work.num_tokens if pieces is None else pieces.tokens
        wholly = work.num_decodes == tokens and work.wants_all
        runs, long = work.max_query_len <= self.limits.longest_run, len(long_rows) > 0
        rows = StepRows(work.num_decodes, not work.decode_only, long, wholly, runs)
        kernels = self.chooser.choose(rows, tokens, len(work.positions)) if len(work.slots) else None
        return Launch(None, pieces, long_rows, rows, kernels)

    def _bucket(self, work: StepWork) -> Bucket | None:
        """The bucket to which the step is padded; None if it has no graph, as steps with scored prompts."""
        requested = work.logprob_rows
        if self.graphs is None or (requested is not None and requested.reads_more(pools_all=self._pools_all)):
            return None
        return self.graphs.bucket(work, adapted=self._adapted)

    def _cut(self, work: StepWork, bucket: Bucket | None, long_rows: tuple[LongRow, ...]) -> QuerySpans:
        """The division for attention of the step's prompts, except ``long_rows``."""
        most, config = len(self.uploader.header.spans), None
        if bucket is not None:
            most, config = bucket.spans, self._configs[bucket.long_past]
        starts, device = work.query_start, self.kv_cache.device
        lens = work.starts + np.diff(starts)
        return self._ops.cut_prompts(starts, lens, work.num_decodes, self._shape, device, most, long_rows, config)

    def forward(self, work: StepWork, cut: QuerySpans | None, launch: Launch) -> torch.Tensor:
        """Prepare inputs from the slots and run the model. Returns hidden states [T, H] if prompts are scored or they
        are passed on, else [N, H] of the tokens behind which one is sampled."""
        spans, header, in_pieces = None, self.uploader.header, launch.pieces
        if cut is not None:
            spans = Spans(cut.config, header.spans[: len(cut.spans)], header.merges[: len(cut.merges)])
        pieces = None
        if in_pieces is not None:
            assert self.graphs is not None
            pieces = self.graphs.pieces(in_pieces).of(work.num_tokens)
        return self._forward(
            len(work.slots), work.num_tokens if in_pieces is None else in_pieces.tokens, pieces=pieces,
            num_decodes=work.num_decodes, spans=spans, long_rows=launch.long_rows,
            sampled=None if work.wants_all else len(work.hidden_index), longest=work.max_query_len,
            adapted=self._adapted, runs=launch.rows.runs,
        )  # fmt: skip

    def padded_forward(self, bucket: Bucket, pause: Callable[[], object] = lambda: None) -> torch.Tensor:
        """:meth:`forward` of a step padded to ``bucket``: states [rows, H], pooled numbers, or a stage's states."""
        spans, header = None, self.uploader.header
        if bucket.spans:
            shape, config = self._shape, self._configs[bucket.long_past]
            most = most_merges(shape.shares(config, num_multiprocessors(self.kv_cache.device)))
            spans = Spans(config, header.spans[: bucket.spans], header.merges[:most])
        hidden = self._forward(
            bucket.rows, bucket.tokens, num_decodes=bucket.most_decodes, spans=spans, padded=True, pause=pause,
            sampled=bucket.rows if bucket.spans and not (self._pools_all or bucket.runs) else None,
            adapted=bucket.adapted, longest=min(bucket.tokens, self.limits.max_model_len), runs=bucket.runs,
        )  # fmt: skip
        return self._numbers(hidden, bucket.rows) if self._pools else hidden

    def _forward(
        self, num_rows: int, num_tokens: int, *, num_decodes: int, spans: Spans | None, padded: bool = False,
        long_rows: tuple[LongRow, ...] = (), pause: Callable[[], object] = lambda: None,
        pieces: Pieces | None = None, sampled: int | None, longest: int = 0, adapted: bool = False,
        runs: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Run the model. ``sampled``: the number of tokens sampled from, if only their hidden states are needed."""
        header, state, inputs = self.uploader.header, self.state, self.inputs
        slots, query_start = header.slots[:num_rows], header.query_start[: num_rows + 1]
        inputs.prepare(num_tokens, state.tokens, state.all_tables, slots, header.starts[:num_rows], query_start)
        tokens = self.tokens(num_tokens)
        index = None if sampled is None or self.model.passes_on else header.hidden_index[:sampled]
        last = None
        if index is not None and self._decodes_apart and not gives_all(self.model):
            last = LastTokens(index, header.sample_slots[:sampled], header.sample_lens[:sampled])
        batch = AttentionBatch(
            slots=slots,
            query_start=query_start,
            context_lens=inputs.context_lens[:num_rows],
            slot_mapping=inputs.slot_mappings[0, :num_tokens],
            block_tables=state.block_tables,
            num_decodes=num_decodes,
            long_rows=long_rows,
            decode_lens=header.decode_lens[:num_rows] if padded and spans is not None and num_decodes else None,
            spans=spans,
            longest=longest,
            runs=runs,
            last=last,
            windowed_tables=state.windowed_tables,
            windowed_mappings=tokens.windowed_mappings,
        )
        if self.head is not None:
            self.head.accompany(tokens, batch, pause)
        if pieces is not None:
            hidden = pieces.forward(as_decoder(self.model), tokens, batch)
        else:
            ending = None if last is None else last.slots
            adapters = self.adapters if adapted else None
            with adapters.planned(slots, query_start, num_tokens, ending) if adapters else nullcontext():
                hidden = self.model.forward(tokens.ids, tokens.positions, self.kv_cache, batch, pause)
        return hidden if index is None or last is not None else hidden.index_select(0, index)

    def tokens(self, count: int) -> Tokens:
        """The first ``count`` tokens of a pass."""
        return self.inputs.tokens(count, self.kv_cache)

    def sample_plainly(self, logits: torch.Tensor, *, any_random: bool) -> torch.Tensor:
        """Sample tokens [N] int32 from ``logits`` [N, V] of the sampling rows, and store them in their slots."""
        header, count = self.uploader.header, len(logits)
        slots = header.sample_slots[:count]
        sampled = self._sampler.plain(logits, slots, header.indexes[:count], any_random=any_random)
        self._ops.store_sampled(self.state.tokens, slots, header.positions[:count], sampled)
        return sampled

    def _numbers(self, hidden: torch.Tensor, num_parts: int) -> torch.Tensor:
        """What is pooled of ``hidden`` [., H], for the upload's first parts: [p, numbers] float32."""
        firsts, counts = (each[:num_parts] for each in self.uploader.header.parts)
        return numbers_of_parts(hidden, firsts, counts, self.model.pooled_head, self._ops)

    def _score_prompts(
        self, work: StepWork, hidden: torch.Tensor, deltas: dict[str, torch.Tensor], *, pooled: bool = False
    ) -> None:
        """Of states ``hidden`` [., H], or of numbers [rows, .] that are ``pooled`` already."""
        if (requested := work.logprob_rows) is None or self.scores is None:
            return
        if "prompt_hidden" in deltas:
            index, tokens = deltas["prompt_hidden"], deltas["prompt_index"]
            told = partial(logits_at, self.model.logits, hidden, self.adapters if self._adapted else None)
            self.scores.keep_prompts(self._logprobs.prompts(requested, index, tokens, told))
        if num_parts := len(requested.pooled):
            self.scores.keep_pooled(hidden[:num_parts] if pooled else self._numbers(hidden, num_parts))

    def _eager_tokens(
        self, work: StepWork, hidden: torch.Tensor, deltas: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V] of the rows that sample, and their tokens [N]."""
        if len(hidden) > len(work.hidden_index):
            hidden = hidden.index_select(0, self.uploader.header.hidden_index[: len(work.hidden_index)])
        with sampled(self.adapters if self._adapted else None, self.uploader.header.sample_slots[: len(hidden)]):
            logits = self.model.logits(hidden)
        if len(deltas.get("extra_rows", ())) == len(logits):  # every row will be sampled again
            return logits, torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        return logits, self.sample_plainly(logits, any_random=work.any_random)

    def sample_with_extras(self, extras: Extras, logits: torch.Tensor, *, any_random: bool) -> torch.Tensor:
        """:meth:`sample_plainly` with ``extras``, which change ``logits``."""
        header, count = self.uploader.header, len(logits)
        slots, indexes = header.sample_slots[:count], header.indexes[:count]
        places = header.mask_places[:count]
        tokens = self._sampler.extras(extras, logits, slots, indexes, places, any_random=any_random)
        self._ops.store_sampled(self.state.tokens, slots, header.positions[:count], tokens)
        return tokens

    def _sample_again(
        self, work: StepWork, bucket: Bucket | None, deltas: dict[str, torch.Tensor], logits: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """``sampled`` with other tokens in the extra rows, which are also stored in the slots; from a graph, if there
        is one behind that of ``bucket``."""
        if len(work.constrained):
            self.state.step_masks.make()
        if self.graphs is not None and bucket is not None:
            wanted = resampling_of(work, bucket, self.state.num_growths, self.limits.vocab_size)
            if wanted is not None and self.graphs.can_resample(wanted):
                self._send_masks(work)
                return self.graphs.resample(wanted, self, logits)
        return self._resample(work, deltas, logits, sampled)

    def _send_masks(self, work: StepWork) -> None:
        """Send masks as late as possible: the host may have to wait for them, and the device waits for launches behind
        them."""
        if len(work.constrained):
            self.state.step_masks.send(self._fill_masks(work))

    def _resample(
        self, work: StepWork, deltas: dict[str, torch.Tensor], logits: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """:meth:`_sample_again` kernel by kernel."""
        header, rows = self.uploader.header, deltas["extra_rows"]
        every_row = len(rows) == len(work.positions)
        may_change = every_row and work.logprob_rows is None
        logits = logits[: len(rows)] if may_change else logits.index_select(0, rows)
        if every_row:
            self._send_masks(work)
            return self.sample_with_extras(work.extras, logits, any_random=work.extra_random)
        columns = header.sample_slots, header.indexes, header.positions, header.mask_places
        slots, indexes, positions, places = (column.index_select(0, rows) for column in columns)
        self._send_masks(work)  # all before is launched while the host waits
        tokens = self._sampler.extras(work.extras, logits, slots, indexes, places, any_random=work.extra_random)
        self._ops.store_sampled(self.state.tokens, slots, positions, tokens)
        sampled[rows.long()] = tokens
        return sampled


def _no_masks(work: StepWork) -> torch.Tensor:
    raise EngineError("this engine follows no grammars")
