"""Matches step results to planned rows, and keeps sequences that were preempted with steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.events import ProtocolError
from pagebus.actors.scheduler.replica.drafts.acceptance import Acceptance
from pagebus.actors.scheduler.replica.drafts.runs import Runs, turns
from pagebus.actors.scheduler.replica.plan_builder import InFlight
from pagebus.actors.scheduler.replica.slots import Slots, SlotTable
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import END_NONE, Int32Array, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class RunSlots:
    """Runs of sequences that are still in their ``slots`` [m], and the drafts ``planned`` for each [m]."""

    runs: Runs
    slots: Slots
    planned: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class ResultRows:
    """Rows of a result whose sequences are still in their slots: the slots, and a mask over the result's rows [n]."""

    slots: Slots
    running: NDArray[np.bool_] | None
    """None: all rows."""
    runs: RunSlots | None = None
    """Of a step in which some row had drafts: the rows by run."""


def same_ints(one: Int32Array, other: Int32Array) -> bool:
    """Whether two arrays are equal; for the few hundred values of a step this is several times faster than numpy's."""
    return one.tobytes() == other.tobytes()


class StepResults:
    """Applies the results of one replica. ``last_step`` is the last step whose result was applied.

    A sequence preempted while steps in flight still sample tokens for it is held here until the last of those results.
    Only then are all of its tokens known.
    """

    def __init__(self, replica: str, table: SlotTable, last_step: int) -> None:
        self.last_step = last_step
        self._replica = replica
        self._table = table
        self._sequences: dict[int, Sequence] = {}
        self.acceptance = Acceptance(table.num_drafts)

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence that left its slot before all of its results arrived."""
        sequence.belong_to(self._replica)
        self._sequences[sequence.id] = sequence

    def expects(self, sequence_id: int) -> bool:
        """Whether a held sequence has this id, so that its tokens are still wanted."""
        return sequence_id in self._sequences

    def drop(self, sequence: Sequence) -> None:
        """Stop holding a sequence that has ended. Its later results are ignored."""
        del self._sequences[sequence.id]
        sequence.belong_to(None)

    def release_all(self) -> None:
        """Release every held sequence with the tokens known now: no more results will arrive."""
        for sequence in list(self._sequences.values()):
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.drop(sequence)
        sequence.become(sequence.at_rest)

    def match(self, flight: InFlight | None, result: StepResult) -> ResultRows:
        """Match ``result`` to the rows of ``flight`` and validate it. Changes nothing.

        Raises:
            ProtocolError: another step is due, rows are unknown or missing, or tokens have wrong indexes.
        """
        if flight is None or result.step != flight.step:
            due = "none" if flight is None else flight.step
            raise ProtocolError(f"a result for step {result.step} came, due is {due}")
        ids = result.sequence_ids
        if not len(ids) == len(result.token_ids) == len(result.token_indexes) == len(result.ends):
            raise ProtocolError(f"step {result.step}: the columns of the result differ in length")
        if flight.drafts is not None:
            return self._match_runs(flight, flight.drafts, result)
        slots = flight.sample_slots
        if not same_ints(ids, flight.sample_ids):
            slots = flight.sample_slots[self._match_some(flight, ids)]
        if len(result.num_drafts) not in (0, len(ids)):  # none: the step looked up none
            raise ProtocolError(f"step {result.step}: the result does not tell the drafts of its rows")
        running = self._table.ids[slots] == ids
        if np.count_nonzero(running) == len(ids):
            self._check_indexes(slots, result.token_indexes, result.ends)
            return ResultRows(slots, None)
        self._check_indexes(slots[running], result.token_indexes[running], result.ends[running])
        self._check_preempted(result)
        return ResultRows(slots[running], running)

    def _match_runs(self, flight: InFlight, drafts: Int32Array, result: StepResult) -> ResultRows:
        """:meth:`match` where rows may have had ``drafts`` [s]."""
        every = Runs.of(result)
        ids = result.sequence_ids[every.firsts]
        present = self._match_some(flight, ids)
        slots, planned = flight.sample_slots[present], drafts[present]
        if np.count_nonzero(every.counts > 1 + planned):
            raise ProtocolError(f"step {result.step}: a sequence has more tokens than were planned for it")
        running = self._table.ids[slots] == ids
        runs, slots = every.where(running), slots[running]
        self._check_indexes(slots, result.token_indexes[runs.firsts], result.ends[runs.lasts], runs.counts - 1)
        self._check_preempted(result)
        of_rows = np.repeat(running, every.counts)
        return ResultRows(np.repeat(slots, runs.counts), of_rows, RunSlots(runs, slots, planned[running]))

    def _match_some(self, flight: InFlight, ids: Int32Array) -> NDArray[np.bool_]:
        """Which rows are those with these ``ids``. Only rows of ended sequences may be missing."""
        present = np.isin(flight.sample_ids, ids)
        if not np.array_equal(flight.sample_ids[present], ids):
            raise ProtocolError(f"step {flight.step}: the result has rows that the plan has not, or in another order")
        absent_ids = flight.sample_ids[~present]
        absent = self._table.ids[flight.sample_slots[~present]] == absent_ids
        if absent.any() or any(each in self._sequences for each in absent_ids.tolist()):
            raise ProtocolError(f"step {flight.step}: the result lacks rows of sequences that have not ended")
        return present

    def _check_indexes(self, slots: Slots, indexes: Int32Array, ends: Int32Array, more: Int32Array | int = 0) -> None:
        """``more`` tokens follow those with these ``indexes``, and the last has this end."""
        known = self._table.known[slots]
        if not same_ints(known - self._table.prompt[slots], indexes):
            raise ProtocolError("a token has another index than the one due")
        at_limit = known + more >= self._table.last[slots]
        if np.count_nonzero(at_limit) and np.count_nonzero(ends[at_limit] == END_NONE):
            raise ProtocolError("a sequence has reached its limit and did not end")

    def _check_preempted(self, result: StepResult) -> None:
        before = -1
        for sequence_id, index in zip(result.sequence_ids.tolist(), result.token_indexes.tolist(), strict=True):
            sequence, follows = self._sequences.get(sequence_id), sequence_id == before
            before = sequence_id
            if sequence and not follows and len(sequence.tokens) - len(sequence.request.prompt) != index:
                raise ProtocolError(f"token {index} of sequence {sequence_id} is not the one due")

    def confirm(self, flight: InFlight, list_blocks: Callable[[Slots], None] | None) -> None:
        """Mark the step as done. Lists newly full blocks of sequences that are still in their slots."""
        self.last_step = flight.step
        if list_blocks is not None:
            same = self._table.ids[flight.slots] == flight.ids
            list_blocks(flight.slots if np.count_nonzero(same) == len(same) else flight.slots[same])

    def apply(self, matched: ResultRows, result: StepResult) -> list[tuple[Sequence, int]]:
        """Store the sampled tokens. Returns the sequences that they ended, each with its ``ends`` code."""
        table, slots = self._table, matched.slots
        if matched.runs is not None:
            self._settle(matched.runs, result)
        token_ids, indexes, ends = result.token_ids, result.token_indexes, result.ends
        ended: list[tuple[Sequence, int]] = []
        if matched.running is not None:
            ended = self._apply_preempted(result, matched.running)
            token_ids, indexes, ends = token_ids[matched.running], indexes[matched.running], ends[matched.running]
        if table.num_beams:  # the search chooses a beam's token, not the sampler
            kept = ~table.beam[slots]
            slots, token_ids, indexes, ends = slots[kept], token_ids[kept], indexes[kept], ends[kept]
        if matched.runs is None:
            table.take_tokens(slots, token_ids)
            if table.num_drafts:
                told = result.num_drafts
                if len(told) and matched.running is not None:
                    told = told[matched.running]
                table.drafts[matched.slots] = told if len(told) else 0
        else:
            for rows in turns(slots):
                table.take_tokens(slots[rows], token_ids[rows])
        for row in (indexes == 0).nonzero()[0].tolist():
            sequence = table.at(slots[row])
            sequence.got_first_token()
            sequence.request.got_token(result.done_s)
        ended += [(table.at(slots[row]), int(ends[row])) for row in ends.nonzero()[0].tolist()]
        for sequence in [each for each in self._sequences.values() if each.last_step <= self.last_step]:
            self._release(sequence)
        return ended

    def _settle(self, matched: RunSlots, result: StepResult) -> None:
        """Count what became of the drafts that a step has verified, and note those that are ready now."""
        table, slots, runs = self._table, matched.slots, matched.runs
        accepted = runs.counts - 1
        self.acceptance.count(table.settle_drafts(slots, accepted, matched.planned), accepted)
        table.drafts[slots] = result.num_drafts[runs.lasts]

    def _apply_preempted(self, result: StepResult, running: NDArray[np.bool_]) -> list[tuple[Sequence, int]]:
        ended = []
        for row in np.flatnonzero(~running).tolist():
            sequence = self._sequences.get(int(result.sequence_ids[row]))
            if sequence is None or sequence.beam_group is not None:
                continue  # aborted or stopped meanwhile, or a beam search, which repeats this step
            sequence.tokens.append(int(result.token_ids[row]))
            sequence.got_first_token()
            sequence.request.got_token(result.done_s)
            if result.ends[row] != END_NONE:
                ended.append((sequence, int(result.ends[row])))
        return ended

    def check_integrity(self) -> None:
        """Every held sequence has results to come.

        Raises:
            AssertionError: one has none.
        """
        for sequence in self._sequences.values():
            assert sequence.state is State.PREEMPTED_IN_FLIGHT, f"held sequence {sequence.id} is {sequence.state}"
            assert sequence.last_step > self.last_step, f"sequence {sequence.id} has all its results"
