"""Log probabilities and pooled hidden states of a step, host side: the rows and prompt positions that report them, and
the columns of the result.

A sampled token's alternatives are the most likely tokens, or tokens that the client has listed. The device computes the
former as packed rows (see :func:`pagebus.kernels.sampling.logprobs.token_logprobs`): [n, 2 + 2 * k] int32 with the bits
of the token's log probability, its rank, k ids, and the bits of k log probabilities. k is the largest number requested
by any row of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagebus.bus.messages import Int32Array, NewSequence
from pagebus.bus.messages.field_types import no_ints

BoolArray = NDArray[np.bool_]

NOT_ASKED = -1
MAX_TOP = 256
"""Most alternatives per token that our kernel finds; the whole vocabulary, say, is sorted instead."""


@dataclass(slots=True)
class LogprobRows:
    """What one step reports. ``rows`` [m] of the sampled tokens, with ``counts`` [m] alternatives each; and the parts
    of ``prompts`` [q] sequence ids, ``starts``, ``lengths``, ``prompt_counts`` [q]. ``num_top`` and ``prompt_num_top``
    are the largest counts. ``packed`` and ``packed_prompts`` are the packed rows, once they have come to the host.

    ``pooled`` [p] sequence ids, ``pooled_starts``, ``pooled_lengths`` [p]: parts of prompts whose states are summed;
    ``pooled_firsts`` [p] says where they begin among the hidden states. If ``pooled_sampled``, each is one token behind
    which one is sampled, and the states are those of such tokens. ``packed_pooled`` [p, H] are the bits of the sums.

    ``picking`` [i] are those of the ``rows`` (their places among them) whose alternatives are picked tokens:
    ``picked_counts`` [i] of ``picked_ids`` [K] each. ``packed_picked`` [K] are the bits of their log probabilities."""

    rows: Int32Array
    counts: Int32Array
    prompts: Int32Array
    starts: Int32Array
    lengths: Int32Array
    prompt_counts: Int32Array
    pooled: Int32Array
    pooled_starts: Int32Array
    pooled_lengths: Int32Array
    pooled_firsts: Int32Array
    packed: Int32Array | None = None
    packed_prompts: Int32Array | None = None
    packed_pooled: Int32Array | None = None
    picking: Int32Array = field(default_factory=no_ints)
    picked_counts: Int32Array = field(default_factory=no_ints)
    picked_ids: Int32Array = field(default_factory=no_ints)
    packed_picked: Int32Array | None = None
    pooled_sampled: bool = False

    def arrived(
        self, packed: Int32Array | None, packed_prompts: Int32Array | None, packed_pooled: Int32Array | None,
        packed_picked: Int32Array | None,
    ) -> None:  # fmt: skip
        """What the device has computed is on the host."""
        self.packed, self.packed_prompts = packed, packed_prompts
        self.packed_pooled, self.packed_picked = packed_pooled, packed_picked

    @property
    def reads_prompts(self) -> bool:
        """Whether it needs hidden states behind which nothing is sampled."""
        return bool(len(self.prompts) or (len(self.pooled) and not self.pooled_sampled))

    def reads_more(self, *, pools_all: bool) -> bool:
        """Whether it needs other states than a step that is padded gives: ``pools_all`` of all tokens, to be pooled;
        otherwise of those behind which one is sampled."""
        return len(self.prompts) > 0 if pools_all else self.reads_prompts

    @property
    def num_top(self) -> int:
        return int(self.counts.max(initial=0))

    @property
    def prompt_num_top(self) -> int:
        return int(self.prompt_counts.max(initial=0))


class LogprobSlots:
    """Which slots report log probabilities, of how many alternatives, and the prompt's states, from which token on;
    ``NOT_ASKED`` for none."""

    def __init__(self, size: int, row_tokens: int, vocab_size: int, *, pools_all: bool = False) -> None:
        """``row_tokens``: the length of rows in the flat token table. ``pools_all``: steps give the states of all their
        tokens, whatever is pooled."""
        self._row_tokens, self._vocab_size, self._pools_all = row_tokens, vocab_size, pools_all
        self._output = np.full(size, NOT_ASKED, np.int32)
        self._prompt = np.full(size, NOT_ASKED, np.int32)
        self._pooled_from = np.full(size, NOT_ASKED, np.int32)
        self._pooled_until = np.zeros(size, np.int32)
        self._picked: dict[int, Int32Array] = {}
        """The tokens that are reported in place of the most likely ones, by slot."""
        self._any = False

    def enter(self, new: NewSequence) -> None:
        """Note what the sequence asks for in its slot."""
        sampling = new.sampling
        self._output[new.slot] = _count(sampling.logprobs, self._vocab_size)
        self._prompt[new.slot] = _count(sampling.prompt_logprobs, self._vocab_size)
        self._pooled_from[new.slot] = NOT_ASKED if new.pooled_from is None else max(0, new.pooled_from)
        self._pooled_until[new.slot] = new.num_prompt_tokens if new.pooled_until is None else new.pooled_until
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None or new.pooled_from is not None:
            self._any = True
        ids = [token_id for token_id in sampling.logprob_token_ids if 0 <= token_id < self._vocab_size]
        if sampling.logprobs is not None and ids:
            self._output[new.slot] = min(1, self._vocab_size)  # from the most likely one follow the others
            self._picked[new.slot] = np.array(ids, np.int32)
        elif self._picked:
            self._picked.pop(new.slot, None)

    def free(self, slots: Int32Array) -> None:
        """Nothing is asked for in these slots any more."""
        if self._any:
            asked = (self._output, self._prompt, self._pooled_from)
            for column in asked:
                column[slots] = NOT_ASKED
            self._any = any(bool((column >= 0).any()) for column in asked)
            for slot in slots.tolist() if self._picked else ():
                self._picked.pop(slot, None)

    def rows_of(
        self,
        sample_slots: Int32Array,
        slots: Int32Array,
        starts: Int32Array,
        query_start: Int32Array,
        num_prompt: Int32Array,
        sequence_ids: Int32Array,
        hidden_index: Int32Array,
        deltas: dict[str, Int32Array],
    ) -> LogprobRows | None:
        """What a step with these rows reports, None if nothing.

        ``slots``, ``starts``, ``num_prompt`` and ``sequence_ids`` are [R], ``query_start`` [R+1], ``sample_slots`` and
        ``hidden_index`` [N]. Puts ``score_rows`` [m] (rows of the logits), ``prompt_hidden`` [Q] (rows of the hidden
        states) and ``prompt_index`` [Q] (their tokens in the flat token table) into ``deltas``.
        """
        if not self._any:
            return None
        asked = self._output[sample_slots]
        rows = np.flatnonzero(asked >= 0).astype(np.int32)
        # The state after token i scores token i + 1; the last prompt token's state is for the first sampled one.
        lengths = np.minimum(starts + np.diff(query_start), num_prompt - 1) - starts
        parts = np.flatnonzero((self._prompt[slots] >= 0) & (lengths > 0))
        pooled_from = self._pooled_from[slots]
        skipped = np.maximum(pooled_from - starts, 0)
        until = np.minimum(self._pooled_until[slots], num_prompt)
        pooled_lengths = np.minimum(starts + np.diff(query_start), until) - starts - skipped
        pooled = np.flatnonzero((pooled_from >= 0) & (pooled_lengths > 0))
        if not len(rows) and not len(parts) and not len(pooled):
            return None
        requested = LogprobRows(
            rows=rows,
            counts=asked[rows],
            prompts=sequence_ids[parts],
            starts=starts[parts] + np.int32(1),
            lengths=lengths[parts],
            prompt_counts=self._prompt[slots[parts]],
            pooled=sequence_ids[pooled],
            pooled_starts=(starts + skipped)[pooled],
            pooled_lengths=pooled_lengths[pooled],
            pooled_firsts=(query_start[:-1] + skipped)[pooled],
        )
        if len(pooled) and not len(parts) and not self._pools_all:
            _find_sampled(requested, hidden_index)
        if len(rows):
            deltas["score_rows"] = rows
            if self._picked:
                self._pick(requested, sample_slots[rows], deltas)
        if len(parts):
            _put_prompts(requested, query_start[:-1][parts], slots[parts] * np.int32(self._row_tokens), deltas)
        return requested

    def _pick(self, requested: LogprobRows, slots: Int32Array, deltas: dict[str, Int32Array]) -> None:
        """Note the picked tokens of the scored rows, which are in these ``slots`` [m]. Puts ``picked_rows`` [K] (places
        among the scored rows) and ``picked_ids`` [K] into ``deltas``."""
        found = [
            (place, ids) for place, slot in enumerate(slots.tolist()) if (ids := self._picked.get(slot)) is not None
        ]
        if found:
            requested.picking = np.array([place for place, _ in found], np.int32)
            requested.picked_counts = np.array([len(ids) for _, ids in found], np.int32)
            requested.picked_ids = np.concatenate([ids for _, ids in found])
            deltas["picked_rows"] = np.repeat(requested.picking, requested.picked_counts)
            deltas["picked_ids"] = requested.picked_ids


def _find_sampled(requested: LogprobRows, hidden_index: Int32Array) -> None:
    """Look for the pooled parts among the tokens behind which one is sampled: each may be one of these."""
    if (requested.pooled_lengths == 1).all():
        places = np.searchsorted(hidden_index, requested.pooled_firsts).astype(np.int32)
        there = hidden_index[places[places < len(hidden_index)]]
        if np.array_equal(there, requested.pooled_firsts):
            requested.pooled_sampled, requested.pooled_firsts = True, places


def ranges(starts: Int32Array, counts: Int32Array) -> Int32Array:
    """start, start + 1, ... for each pair, one after another: ([10, 20], [2, 3]) -> [10, 11, 20, 21, 22]."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + counts[0], dtype=np.int32)
    before = np.cumsum(counts, dtype=np.int32) - counts
    total = int(counts.sum())
    return np.repeat(starts - before, counts) + np.arange(total, dtype=np.int32)


def _put_prompts(
    requested: LogprobRows, hidden_starts: Int32Array, table_starts: Int32Array, deltas: dict[str, Int32Array]
) -> None:
    """Put rows of prompts into ``deltas``: from the first of each [p] in the hidden states and in the token table."""
    deltas["prompt_hidden"] = ranges(hidden_starts, requested.lengths)
    deltas["prompt_index"] = ranges(table_starts + requested.starts, requested.lengths)


def result_columns(requested: LogprobRows, late: BoolArray) -> dict[str, Int32Array]:
    """What a :class:`StepResult` reports besides tokens; ``late`` [N] are rows that it leaves out."""
    columns: dict[str, Int32Array] = {}
    sampled, prompts = requested.packed, requested.packed_prompts
    if sampled is not None:
        kept = ~late[requested.rows]
        row_after = np.cumsum(~late, dtype=np.int32) - np.int32(1)
        packed, counts = sampled[kept], requested.counts[kept]
        columns["logprob_rows"] = row_after[requested.rows[kept]]
        columns["logprob_bits"] = packed[:, 0].copy()
        if requested.packed_picked is None:
            columns["top_counts"] = counts
            columns["top_ids"], columns["top_bits"] = _tops(packed, counts)
        else:
            columns |= _with_picked(requested, requested.packed_picked, sampled, kept)
    if prompts is not None:
        columns["prompt_sequence_ids"] = requested.prompts
        columns["prompt_starts"] = requested.starts
        columns["prompt_lengths"] = requested.lengths
        columns["prompt_top_counts"] = requested.prompt_counts
        columns["prompt_bits"] = prompts[:, 0].copy()
        columns["prompt_ranks"] = prompts[:, 1].copy()
        counts = np.repeat(requested.prompt_counts, requested.lengths)
        columns["prompt_top_ids"], columns["prompt_top_bits"] = _tops(prompts, counts)
    if requested.packed_pooled is not None:
        columns["pooled_sequence_ids"] = requested.pooled
        columns["pooled_starts"] = requested.pooled_starts
        columns["pooled_lengths"] = requested.pooled_lengths
        columns["pooled_bits"] = requested.packed_pooled.reshape(-1)
    return columns


def _with_picked(
    requested: LogprobRows, bits: Int32Array, sampled: Int32Array, kept: BoolArray
) -> dict[str, Int32Array]:
    """The alternatives where some rows picked theirs, of the rows that are ``kept`` [m]."""
    likely, counts = requested.counts.copy(), requested.counts.copy()
    likely[requested.picking], counts[requested.picking] = 0, requested.picked_counts
    likely[~kept], counts[~kept] = 0, 0
    stays = np.repeat(kept[requested.picking], requested.picked_counts)
    top_ids, top_bits = _tops(sampled, likely)
    # By row, whose alternatives are all of one kind: a stable sort keeps them in their order.
    rows = np.concatenate([np.repeat(np.arange(len(likely)), likely),
                           np.repeat(requested.picking, requested.picked_counts)[stays]])  # fmt: skip
    order = np.argsort(rows, kind="stable")
    return {
        "top_counts": counts[kept],
        "top_ids": np.concatenate([top_ids, requested.picked_ids[stays]])[order],
        "top_bits": np.concatenate([top_bits, bits[stays]])[order],
    }


def _tops(packed: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Ids and bits of the first ``counts`` alternatives of each packed row, one row after another."""
    width = (packed.shape[1] - 2) // 2
    wanted = np.arange(width) < counts[:, None]
    return packed[:, 2 : 2 + width][wanted], packed[:, 2 + width :][wanted]


def _count(asked: int | None, vocab_size: int) -> int:
    return NOT_ASKED if asked is None else max(0, min(asked, vocab_size))
