"""The persistent batch, host side: what the executor knows of every slot, and how a step plan changes it.

:class:`PersistentBatch` keeps numpy mirrors of the slots. :meth:`PersistentBatch.apply` checks a plan against them,
brings them up to date, and returns a :class:`StepWork`: exactly what the device has to be told and to compute. Token
values live on the device alone; the host knows only how many there are. All work per row is vectorised, so that a
steady decode step costs the same few microseconds at 1 and at 256 rows; Python loops only over sequences that enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.executor import checks
from actors.executor.errors import PlanError
from actors.executor.layout import NUM_COLUMNS, TOP_K, BatchLimits
from actors.executor.restrictions import Restrictions, long_words
from actors.executor.rules import Rules
from actors.executor.scoring import ScoredSlots, ranges
from actors.executor.step_work import StepWork
from bus.messages import Int32Array, NewSequence, StepPlan

GREEDY_BELOW = 1e-5

TRUNCATED, PENALIZED, MASKED, WORDED, CONSTRAINED = 1, 2, 4, 8, 16
"""Bits of a slot's extras: top-k, top-p or min-p; any penalty; a mask of allowed tokens; bad words of several tokens; a
grammar, which gives a mask anew for each token.
Rules (bias, bans) end at an index of their own."""


@dataclass(slots=True)
class _Entering:
    """Columns of the sequences that enter in one plan, gathered row by row."""

    slots: list[int] = field(default_factory=list)
    floats: list[tuple[float, ...]] = field(default_factory=list)
    ints: list[tuple[int, int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


class PersistentBatch:
    """Mirrors of ``max_num_seqs`` slots (and of the dummy slot, always empty). Not thread-safe: one thread applies.

    Without ``decodes_apart`` a decode is a prompt of one token: work of this batch has none.
    """

    def __init__(self, limits: BatchLimits, *, decodes_apart: bool = True) -> None:
        self.limits = limits
        self._decodes_apart = decodes_apart
        self._size = limits.max_num_seqs + 1
        self._table_width = limits.table_width
        self._layout = limits.layout
        if self._layout.size > np.iinfo(np.int32).max:
            raise PlanError(
                f"{limits.max_num_seqs} slots of {limits.max_model_len} tokens are too many to index: "
                "lower --max-num-seqs or --max-model-len"
            )
        self._rules = Rules(self._size, limits.vocab_size)
        self._restrictions = Restrictions(limits.vocab_size)
        self._fill()

    def _fill(self) -> None:
        size = self._size
        self.sequence_ids = np.zeros(size, np.int32)
        self.num_tokens = np.zeros(size, np.int32)
        self.num_computed = np.zeros(size, np.int32)
        self.num_prompt = np.zeros(size, np.int32)
        self.num_blocks = np.zeros(size, np.int32)
        self._max_total = np.zeros(size, np.int32)
        self._min_tokens = np.zeros(size, np.int32)
        self._random = np.zeros(size, np.bool_)
        self._extras = np.zeros(size, np.int32)
        self._rules.until[:] = 0
        self._end_ids = np.full((size, 2), -1, np.int32)
        self._scored = ScoredSlots(size)

    def reset(self) -> None:
        """Empty every slot: a new scheduler starts from nothing. Rows of rules stay on the device until overwritten."""
        self._fill()

    @property
    def num_occupied(self) -> int:
        """Slots that hold a sequence."""
        return int(np.count_nonzero(self.sequence_ids))

    def apply(self, plan: StepPlan) -> StepWork:
        """Bring the mirrors up to date with ``plan`` and return what the device has to do.

        Raises:
            PlanError: the plan breaks a rule of :class:`bus.messages.StepPlan`. The batch is then undefined.
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
            words.append((self._append_blocks(plan), plan.appended_blocks))
        if words:
            deltas["places"] = np.concatenate([places for places, _ in words])
            deltas["values"] = np.concatenate([values for _, values in words])
        if len(plan.copy_sources) or len(plan.copy_targets):
            checks.copies(plan, self.limits.num_blocks)
            deltas["copy_sources"], deltas["copy_targets"] = plan.copy_sources, plan.copy_targets
        return self._rows(plan, deltas)

    # -- slots --------------------------------------------------------------------------------------------------------

    def _free(self, slots: Int32Array) -> None:
        self.sequence_ids[slots] = 0
        self.num_tokens[slots] = 0
        self.num_computed[slots] = 0
        self.num_blocks[slots] = 0
        self._extras[slots] = 0
        self._rules.free(slots)
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
        num_tokens = np.array([new.num_tokens for new in plan.new_sequences], np.int32)
        num_blocks = np.array([new.num_blocks for new in plan.new_sequences], np.int32)
        self._rules.pack(deltas)
        self._restrictions.pack(deltas)
        layout = self._layout
        of_column = layout.columns + np.arange(NUM_COLUMNS, dtype=np.int32)[:, None] * np.int32(layout.num_slots)
        return [
            (ranges(2 * slots, np.full(len(slots), 2, np.int32)), np.array(entering.seeds, np.int64).view(np.int32)),
            ((of_column + slots).reshape(-1), columns.reshape(-1)),
            (ranges(layout.block_tables + slots * np.int32(self._table_width), num_blocks), plan.new_block_ids),
            (ranges(layout.tokens + slots * np.int32(layout.max_tokens), num_tokens), plan.new_token_ids),
        ]

    def _enter_one(self, new: NewSequence, entering: _Entering) -> None:
        slot = new.slot
        self.sequence_ids[slot] = new.sequence_id
        self.num_tokens[slot] = new.num_tokens
        self.num_computed[slot] = new.num_computed_tokens
        self.num_prompt[slot] = new.num_prompt_tokens
        self.num_blocks[slot] = new.num_blocks
        self._max_total[slot] = new.max_total_tokens
        self._min_tokens[slot] = new.min_tokens
        is_random = new.temperature >= GREEDY_BELOW
        self._random[slot] = is_random
        top_k = new.top_k if 0 < new.top_k < self.limits.vocab_size else 0
        self._extras[slot] = _extras(new, is_random, top_k, self.limits.vocab_size)
        self._rules.enter(new)
        self._restrictions.enter(new)
        self._scored.enter(new, self.limits.vocab_size)
        self._set_end_ids(slot, new.end_token_ids)
        entering.slots.append(slot)
        entering.floats.append(
            (
                *(new.temperature, new.top_p, new.min_p),
                *(new.repetition_penalty, new.presence_penalty, new.frequency_penalty),
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
        """The last token of some slots is another one than was sampled."""
        slots = plan.chosen_slots
        checks.chosen_tokens(plan, self.limits, self.sequence_ids, self.num_tokens)
        layout = self._layout
        places: Int32Array = layout.tokens + slots * np.int32(layout.max_tokens) + self.num_tokens[slots] - np.int32(1)
        deltas["chosen_places"], deltas["chosen_values"] = places, plan.chosen_tokens

    def _append_blocks(self, plan: StepPlan) -> Int32Array:
        """Count the appended blocks; returns the words where they go [m]."""
        slots, size = plan.appended_slots, self._size
        checks.appended_blocks(plan, self.sequence_ids, self.limits.num_blocks)
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

    def _rows(self, plan: StepPlan, deltas: dict[str, Int32Array]) -> StepWork:
        slots, scheduled, num_rows = plan.slots, plan.num_scheduled, len(plan.slots)
        if num_rows or len(scheduled):
            checks.row_slots(plan, self.limits, self.sequence_ids)
        elif plan.num_decodes:
            raise PlanError(f"num_decodes is {plan.num_decodes} in a plan without rows")
        starts = self.num_computed[slots]
        ends = starts + scheduled
        known = self.num_tokens[slots]
        query_start = np.zeros(num_rows + 1, np.int32)
        np.cumsum(scheduled, out=query_start[1:])
        if num_rows:
            checks.row_lengths(plan, self.limits, ends, known, self.num_blocks[slots])
        self.num_computed[slots] = ends
        sample_slots, last_tokens = slots, query_start[1:]
        if plan.num_decodes < num_rows:
            rows = np.flatnonzero(ends == known)
            sample_slots, ends, last_tokens = slots[rows], ends[rows], last_tokens[rows]
        self.num_tokens[sample_slots] = ends + 1
        indexes = ends - self.num_prompt[sample_slots]
        work = StepWork(
            num_decodes=plan.num_decodes if self._decodes_apart else 0,
            num_tokens=int(query_start[-1]),
            max_query_len=int(scheduled.max()) if num_rows else 0,
            max_context_len=int((starts + scheduled).max()) if num_rows else 0,
            slots=slots,
            starts=starts,
            query_start=query_start,
            positions=np.where(ends < self.limits.max_model_len, ends, np.int32(-1)),
            indexes=indexes,
            hidden_index=last_tokens - np.int32(1),
            context_lens=ends,
            sample_slots=sample_slots,
            sequence_ids=self.sequence_ids[sample_slots],
            length_ended=ends + 1 >= self._max_total[sample_slots],
            can_stop=indexes >= self._min_tokens[sample_slots],
            end_ids=self._end_ids[sample_slots],
            deltas=deltas,
            new_slots=[new.slot for new in plan.new_sequences],
        )
        self._mark_extras(work)
        work.scoring = self._scored.scoring(
            sample_slots, slots, starts, query_start, self.num_prompt[slots], self.sequence_ids[slots],
            deltas, self.limits.max_model_len,
        )  # fmt: skip
        return work

    def _mark_extras(self, work: StepWork) -> None:
        """Which of the sampled rows need more than plain sampling: ``deltas["extra_rows"]``, absent if none does."""
        slots = work.sample_slots
        random = self._random[slots]
        work.any_random = bool(random.any())
        extras = self._extras[slots]
        ruled = work.indexes < self._rules.until[slots]
        rows = np.flatnonzero((extras != 0) | ruled)
        if not len(rows):
            return
        work.deltas["extra_rows"] = rows.astype(np.int32)
        kinds = int(np.bitwise_or.reduce(extras[rows]))
        work.extra_random = bool(random[rows].any())
        work.extra_truncated = bool(kinds & TRUNCATED)
        work.extra_penalized = bool(kinds & PENALIZED)
        work.extra_ruled = bool(ruled.any())
        work.extra_masked = bool(kinds & (MASKED | CONSTRAINED))
        work.extra_worded = bool(kinds & WORDED)
        if kinds & CONSTRAINED:
            work.constrained = rows[extras[rows] & CONSTRAINED != 0].astype(np.int32)
            work.deltas["constrained_slots"] = slots[work.constrained]


def _extras(new: NewSequence, is_random: bool, top_k: int, vocab_size: int) -> int:
    """Truncation changes nothing for a greedy row, so it is no extra there."""
    truncated = is_random and (top_k > 0 or new.top_p < 1.0 or new.min_p > 0.0)
    penalized = new.repetition_penalty != 1.0 or new.presence_penalty != 0.0 or new.frequency_penalty != 0.0
    kinds = TRUNCATED * truncated | PENALIZED * penalized
    kinds |= MASKED * bool(new.allowed_token_ids) | CONSTRAINED * bool(new.grammar)
    return kinds | WORDED * bool(long_words(new, vocab_size))


def _rank(values: Int32Array) -> Int32Array:
    """How many equal values come before each: [5, 7, 5, 5] -> [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    rank = np.empty(len(values), np.int32)
    rank[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered, side="left")
    return rank
