"""The persistent batch, host side: the state of every slot, and the changes that step plans make to it.

:class:`PersistentBatch` keeps numpy mirrors of the slots. :meth:`PersistentBatch.apply` checks a plan against them,
updates them, and returns a :class:`StepWork`: exactly what to upload and compute. Token values are on the device only;
the host knows only their number. All work per row is vectorised, and the numbers of a slot are a column of one table.
So a step takes its rows at once, and a steady decode step costs the same few microseconds at 1 and at 256 rows. Python
loops only over sequences that enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagebus.actors.executor.batch import checks
from pagebus.actors.executor.batch.drafted_rows import KnownLengths, RowBounds, check_rows, lay_out, row_bounds
from pagebus.actors.executor.batch.layout import NUM_COLUMNS, TOP_K, BatchLimits
from pagebus.actors.executor.batch.logit_bias import LogitBias
from pagebus.actors.executor.batch.logprob_rows import LogprobSlots, ranges
from pagebus.actors.executor.batch.step_work import (
    CONSTRAINED,
    MASKED,
    PENALIZED,
    RANDOM,
    TRUNCATED,
    WORDED,
    StepWork,
)
from pagebus.actors.executor.batch.token_masks import TokenMasks, long_words
from pagebus.actors.executor.device.errors import PlanError
from pagebus.bus.messages import Int32Array, NewSequence, SamplingParams, StepPlan

GREEDY_BELOW = 1e-5
ONE, NOWHERE = np.int32(1), np.int32(-1)

ID, TOKENS, COMPUTED, PROMPT, BLOCKS, MAX_TOTAL, MIN_TOKENS, KINDS, RULED_UNTIL = range(9)
"""Rows of the table of slots; kinds are bits of :mod:`pagebus.actors.executor.batch.step_work`."""


@dataclass(slots=True)
class _Entering:
    """Columns of the sequences that enter in one plan, gathered row by row."""

    slots: list[int] = field(default_factory=list)
    floats: list[tuple[float, ...]] = field(default_factory=list)
    ints: list[tuple[int, int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


class PersistentBatch:
    """Mirrors of ``max_num_seqs`` slots and of the dummy slot, which is always empty. Not thread-safe: one thread
    applies plans.

    Without ``decodes_apart`` a decode counts as a prompt of one token, and the work of this batch has no decodes.
    With ``pools_all`` steps give the states of all their tokens.
    """

    def __init__(self, limits: BatchLimits, *, decodes_apart: bool = True, pools_all: bool = False) -> None:
        self.limits = limits
        self._decodes_apart, self._pools_all = decodes_apart, pools_all
        self._size = limits.max_num_seqs + 1
        self._table_width = limits.table_width
        self._layout = limits.layout
        if self._layout.size > np.iinfo(np.int32).max:
            raise PlanError(
                f"{limits.max_num_seqs} slots of {limits.max_model_len} tokens are too many to index: "
                "lower --max-num-seqs or --max-model-len"
            )
        self._table = np.zeros((RULED_UNTIL + 1, self._size), np.int32)
        columns = self._table
        self.sequence_ids, self.num_tokens, self.num_computed = columns[ID], columns[TOKENS], columns[COMPUTED]
        self.num_blocks = columns[BLOCKS]
        self._logit_bias = LogitBias(columns[RULED_UNTIL], limits.vocab_size)
        self._token_masks = TokenMasks(limits.vocab_size)
        self._fill()

    def _fill(self) -> None:
        self._table.fill(0)
        self._end_ids = np.full((self._size, 2), -1, np.int32)
        self._scored = LogprobSlots(
            self._size, self._layout.max_tokens, self.limits.vocab_size, pools_all=self._pools_all
        )
        self._lengths = KnownLengths(self._size)

    def reset(self) -> None:
        """Empty every slot for a new scheduler. Rows of logit biases stay on the device until overwritten."""
        self._fill()

    @property
    def num_occupied(self) -> int:
        """Slots that hold a sequence."""
        return int(np.count_nonzero(self.sequence_ids))

    def use(self, limits: BatchLimits) -> None:
        """Check plans by these limits from now on: the cache has got its final size."""
        self.limits = limits

    def apply(self, plan: StepPlan) -> StepWork:
        """Apply ``plan`` to the mirrors, and return the device's work.

        Raises:
            PlanError: the plan breaks a rule of :class:`pagebus.bus.messages.StepPlan`. The batch is then undefined.
        """
        deltas: dict[str, Int32Array] = {}
        if len(plan.freed_slots):
            checks.occupied_slots("freed_slots", plan.freed_slots, self.sequence_ids)
            self._free(plan.freed_slots)
        words: list[tuple[Int32Array, Int32Array]] = []
        if plan.new_sequences or len(plan.new_token_ids) or len(plan.new_block_ids):
            checks.new_sequences(plan, self.limits, self.sequence_ids)
            words += self._enter(plan, deltas)
        if len(plan.cut_slots) or len(plan.cut_blocks):
            checks.cut_blocks(plan, self.sequence_ids, self.num_blocks)
            self.num_blocks[plan.cut_slots] = plan.cut_blocks
        if len(plan.chosen_slots) or len(plan.chosen_tokens):
            self._choose(plan, deltas)
        if len(plan.appended_slots) or len(plan.appended_blocks):
            places = self._append_blocks(plan)
            words.append((places, plan.appended_blocks))
            if len(plan.appended_windowed):
                words.append((self._windowed_places(places), plan.appended_windowed))
        if words:
            deltas["places"] = np.concatenate([places for places, _ in words])
            deltas["values"] = np.concatenate([values for _, values in words])
        if len(plan.copy_sources) or len(plan.copy_targets):
            checks.copies(plan, self.limits.num_blocks)
            deltas["copy_sources"], deltas["copy_targets"] = plan.copy_sources, plan.copy_targets
        if not self.limits.num_drafts:
            return self._rows(plan, deltas)
        if not self._lengths.is_plain(plan):
            return self._drafted_rows(plan, deltas)
        work = self._rows(plan, deltas)
        self._lengths.passed(plan, work.sample_slots)
        return work

    # -- slots --------------------------------------------------------------------------------------------------------

    def _free(self, slots: Int32Array) -> None:
        self._table[:, slots] = 0
        self._scored.free(slots)

    def _enter(self, plan: StepPlan, deltas: dict[str, Int32Array]) -> list[tuple[Int32Array, Int32Array]]:
        """Fill slots; returns (places, values) of the words that change on the device."""
        entering = _Entering()
        for new in plan.new_sequences:
            self._enter_one(new, entering)
        slots = np.array(entering.slots, np.int32)
        columns = np.empty((NUM_COLUMNS, len(slots)), np.int32)
        columns[:TOP_K] = np.array(entering.floats, np.float32).T.copy().view(np.int32)
        columns[TOP_K:] = np.array(entering.ints, np.int32).T
        first_tokens = np.array([new.first_token for new in plan.new_sequences], np.int32)
        num_tokens = np.array([new.num_tokens for new in plan.new_sequences], np.int32) - first_tokens
        num_blocks = np.array([new.num_blocks for new in plan.new_sequences], np.int32)
        first_blocks = np.array([new.first_block for new in plan.new_sequences], np.int32)
        self._logit_bias.pack(deltas)
        self._token_masks.pack(deltas)
        layout = self._layout
        of_column = layout.columns + np.arange(NUM_COLUMNS, dtype=np.int32)[:, None] * np.int32(layout.num_slots)
        words = [
            (ranges(2 * slots, np.full(len(slots), 2, np.int32)), np.array(entering.seeds, np.int64).view(np.int32)),
            ((of_column + slots).reshape(-1), columns.reshape(-1)),
            (
                ranges(first_blocks + layout.block_tables + slots * np.int32(self._table_width), num_blocks),
                plan.new_block_ids,
            ),
            (
                ranges(first_tokens + layout.tokens + slots * np.int32(layout.max_tokens), num_tokens),
                plan.new_token_ids,
            ),
        ]
        if len(plan.new_predicted):
            counts = np.array([new.num_predicted for new in plan.new_sequences], np.int32)
            begin = layout.tokens + slots * np.int32(layout.max_tokens) + np.int32(self.limits.first_predicted)
            words.append((ranges(begin, counts), plan.new_predicted))
        if len(plan.new_windowed):
            first = np.array([new.first_windowed for new in plan.new_sequences], np.int32)
            begin = first + layout.block_tables + slots * np.int32(self._table_width)
            places = ranges(begin, first_blocks + num_blocks - first)
            words.append((self._windowed_places(places), plan.new_windowed))
        return words

    def _windowed_places(self, places: Int32Array) -> Int32Array:
        """The words of the tables of windowed pages [n * W] that belong to those of the first table [n]."""
        tables = np.arange(1, self._layout.num_tables, dtype=np.int32) * np.int32(self._layout.table_words)
        return (places[:, None] + tables).reshape(-1)

    def _enter_one(self, new: NewSequence, entering: _Entering) -> None:
        slot, sampling = new.slot, new.sampling
        top_k = sampling.top_k if 0 < sampling.top_k < self.limits.vocab_size else 0
        self._table[:RULED_UNTIL, slot] = (
            *(new.sequence_id, new.num_tokens, new.num_computed_tokens, new.num_prompt_tokens),
            new.first_block + new.num_blocks,
            *(new.max_total_tokens, sampling.min_tokens, _kinds(sampling, top_k, self.limits.vocab_size)),
        )
        self._logit_bias.enter(new)
        self._token_masks.enter(new)
        self._scored.enter(new)
        self._set_end_ids(slot, new.end_token_ids)
        entering.slots.append(slot)
        entering.floats.append(
            (
                *(sampling.temperature, sampling.top_p, sampling.min_p),
                *(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
            )
        )
        entering.ints.append((top_k, new.num_prompt_tokens))
        entering.seeds.append((new.seed + 2**63) % 2**64 - 2**63)

    def _set_end_ids(self, slot: int, end_ids: tuple[int, ...]) -> None:
        missing = len(end_ids) - self._end_ids.shape[1]
        if missing > 0:
            self._end_ids = np.pad(self._end_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._end_ids[slot] = -1
        # Ids that no vocabulary holds never match a sampled token; they only must fit the array.
        self._end_ids[slot, : len(end_ids)] = [i if 0 <= i < self.limits.vocab_size else -1 for i in end_ids]

    def _choose(self, plan: StepPlan, deltas: dict[str, Int32Array]) -> None:
        """Replace the last tokens of slots whose beams were assigned others than they sampled."""
        slots = plan.chosen_slots
        checks.chosen_tokens(plan, self.limits, self.sequence_ids, self.num_tokens)
        layout = self._layout
        places: Int32Array = layout.tokens + slots * np.int32(layout.max_tokens) + self.num_tokens[slots] - np.int32(1)
        deltas["chosen_places"], deltas["chosen_values"] = places, plan.chosen_tokens

    def _append_blocks(self, plan: StepPlan) -> Int32Array:
        """Count the appended blocks; returns the words of the block tables that they fill [m]."""
        slots, size = plan.appended_slots, self._size
        checks.appended_blocks(plan, self.sequence_ids, self.limits)
        counts = np.bincount(slots, minlength=size).astype(np.int32)
        columns = self.num_blocks[slots]
        if counts.max() > 1:
            columns = columns + _rank(slots)
        self.num_blocks += counts
        if self.num_blocks.max() > self._table_width:
            slot = int(self.num_blocks.argmax())
            raise PlanError(
                f"appended_blocks: slot {slot} gets block {int(self.num_blocks[slot])} of at most {self._table_width}"
            )
        places: Int32Array = self._layout.block_tables + slots * np.int32(self._table_width) + columns
        return places

    # -- the pass -----------------------------------------------------------------------------------------------------

    def _checked_rows(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """The table's columns [., rows] of the plan's slots, and how many tokens [rows] are computed with this step.

        Raises:
            PlanError: the plan's rows break a rule.
        """
        if len(plan.slots) or len(plan.num_scheduled):
            checks.row_slots(plan, self.limits, self.sequence_ids)
        elif plan.num_decodes:
            raise PlanError(f"num_decodes is {plan.num_decodes} in a plan without rows")
        rows = self._table.take(plan.slots, axis=1)
        ends = rows[COMPUTED] + plan.num_scheduled
        if len(plan.slots):
            checks.row_lengths(plan, self.limits, ends, rows[TOKENS], rows[BLOCKS])
        return rows, ends

    def _rows(self, plan: StepPlan, deltas: dict[str, Int32Array]) -> StepWork:
        slots, scheduled, num_rows = plan.slots, plan.num_scheduled, len(plan.slots)
        rows, ends = self._checked_rows(plan)
        starts, known = rows[COMPUTED], rows[TOKENS]
        only_decodes = plan.num_decodes == num_rows
        query_start = np.arange(num_rows + 1, dtype=np.int32)
        if not only_decodes:
            np.cumsum(scheduled, out=query_start[1:])
        self.num_computed[slots] = ends
        sampled, sample_slots, context_lens, hidden_index = rows, slots, ends, query_start[:-1]
        if not only_decodes:
            (finished,) = (ends == known).nonzero()
            sampled, sample_slots, context_lens = rows.take(finished, axis=1), slots[finished], ends[finished]
            hidden_index = query_start[1:][finished] - ONE
        totals, indexes = context_lens + ONE, context_lens - sampled[PROMPT]
        self.num_tokens[sample_slots] = totals
        work = StepWork(
            num_decodes=plan.num_decodes if self._decodes_apart else 0,
            num_tokens=int(query_start[-1]),
            max_query_len=min(1, num_rows) if only_decodes else int(scheduled.max()),
            max_context_len=int(ends.max(initial=0)),
            slots=slots,
            starts=starts,
            query_start=query_start,
            positions=np.where(context_lens < self.limits.max_model_len, context_lens, NOWHERE),
            indexes=indexes,
            hidden_index=hidden_index,
            context_lens=context_lens,
            sample_slots=sample_slots,
            sequence_ids=sampled[ID],
            length_ended=totals >= sampled[MAX_TOTAL],
            can_stop=indexes >= sampled[MIN_TOKENS],
            end_ids=self._end_ids.take(sample_slots, axis=0),
            deltas=deltas,
            new_slots=[new.slot for new in plan.new_sequences],
            logprob_rows=self._scored.rows_of(
                sample_slots, slots, starts, query_start, rows[PROMPT], rows[ID], hidden_index, deltas
            ),
        )  # fmt: skip
        work.mark_extras(sampled[KINDS], indexes < sampled[RULED_UNTIL])
        return work

    def _checked_drafted_rows(self, plan: StepPlan) -> tuple[Int32Array, RowBounds]:
        """As :meth:`_checked_rows`, of an engine that speculates: the columns, and where rows begin and end."""
        if len(plan.slots) or len(plan.num_scheduled):
            checks.row_slots(plan, self.limits, self.sequence_ids)
        rows = self._table.take(plan.slots, axis=1)
        bounds = row_bounds(plan, rows[COMPUTED])
        check_rows(plan, self.limits, bounds, rows[TOKENS], rows[BLOCKS], rows[MAX_TOTAL])
        return rows, bounds

    def _drafted_rows(self, plan: StepPlan, deltas: dict[str, Int32Array]) -> StepWork:
        """:meth:`_rows` of an engine that speculates."""
        rows, bounds = self._checked_drafted_rows(plan)
        slots, starts = plan.slots, bounds.starts
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(plan.num_scheduled, out=query_start[1:])
        samples = lay_out(plan, bounds, rows[TOKENS], query_start)
        self._count_least(plan, bounds, samples.finished)
        sampled, sample_slots = rows.take(samples.rows, axis=1), slots[samples.rows]
        lens, no_flags = samples.context_lens, np.zeros(len(samples.rows), np.bool_)
        runs = samples.runs(rows[PROMPT], rows[MAX_TOTAL], rows[MIN_TOKENS], exact=bounds.exact)
        work = StepWork(
            num_decodes=plan.num_decodes if self._decodes_apart else 0,
            num_tokens=int(query_start[-1]),
            max_query_len=int(plan.num_scheduled.max(initial=0)),
            max_context_len=int(bounds.ends.max(initial=0)),
            slots=slots,
            starts=starts,
            query_start=query_start,
            positions=np.where(lens < self.limits.max_model_len, lens, NOWHERE),
            indexes=lens - sampled[PROMPT],
            hidden_index=samples.hidden_index,
            context_lens=lens,
            sample_slots=sample_slots,
            sequence_ids=sampled[ID],
            length_ended=no_flags,
            can_stop=no_flags,
            end_ids=self._end_ids.take(sample_slots, axis=0),
            deltas=deltas,
            new_slots=[new.slot for new in plan.new_sequences],
            runs=runs,
            logprob_rows=self._scored.rows_of(
                sample_slots, slots, starts, query_start, rows[PROMPT], rows[ID], samples.hidden_index, deltas
            ),
        )  # fmt: skip
        work.mark_extras(sampled[KINDS], samples.earliest_lens - sampled[PROMPT] < sampled[RULED_UNTIL])
        if len(work.constrained):
            runs.tell_drafts(self.limits.num_drafts)
        self._lengths.followed(plan, bounds, deltas)
        deltas["sample_starts"] = starts[samples.rows]
        deltas["run_starts"], deltas["run_slots"] = runs.starts, slots[samples.finished]
        return work

    def _count_least(self, plan: StepPlan, bounds: RowBounds, finished: Int32Array) -> None:
        """Count one token of each decode, with drafts or without, and what other rows compute."""
        count, slots = len(plan.latest_starts), plan.slots
        self.num_computed[slots] = bounds.ends
        self.num_computed[slots[:count]] = bounds.earliest[:count] + ONE
        self.num_tokens[slots[finished]] = self.num_computed[slots[finished]] + ONE


def _kinds(sampling: SamplingParams, top_k: int, vocab_size: int) -> int:
    """Truncation changes nothing for a greedy row, so it is no extra there."""
    is_random = sampling.temperature >= GREEDY_BELOW
    truncated = is_random and (top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    kinds = RANDOM * is_random | TRUNCATED * truncated | PENALIZED * (penalties != (1.0, 0.0, 0.0))
    kinds |= MASKED * bool(sampling.allowed_token_ids or sampling.allowed_tokens)
    kinds |= CONSTRAINED * bool(sampling.grammar)
    return kinds | WORDED * bool(long_words(sampling, vocab_size))


def _rank(values: Int32Array) -> Int32Array:
    """The number of equal values before each: [5, 7, 5, 5] -> [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    rank = np.empty(len(values), np.int32)
    rank[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered, side="left")
    return rank
