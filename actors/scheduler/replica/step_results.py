"""Results coming in: which rows they answer, and the sequences that left their slots before their results came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.events import ProtocolError
from pagebus.actors.scheduler.replica.plan_builder import InFlight
from pagebus.actors.scheduler.replica.slots import Slots, SlotTable
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import END_NONE, Int32Array, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A result matched to rows: the slots of those still running, and which rows [n] of the result they are."""

    slots: Slots
    running: NDArray[np.bool_] | None
    """None if all are."""


def same_ints(one: Int32Array, other: Int32Array) -> bool:
    """Whether two arrays are equal; for the few hundred values of a step this is several times faster than numpy's."""
    return one.tobytes() == other.tobytes()


class Landing:
    """Takes results in. Sequences that were preempted while steps in flight still sample tokens for them wait here,
    until the last of those steps has landed; only then all of their tokens are known."""

    def __init__(self, replica: str, table: SlotTable, landed: int) -> None:
        self.landed = landed
        self._replica = replica
        self._table = table
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """The sequence has left its slot before all results of it have come."""
        sequence.replica = self._replica
        self._sequences[sequence.id] = sequence

    def awaits(self, sequence_id: int) -> bool:
        """Whether tokens of a sequence that has left its slot are still wanted."""
        return sequence_id in self._sequences

    def drop(self, sequence: Sequence) -> None:
        """The sequence has ended; what still comes for it is ignored."""
        del self._sequences[sequence.id]
        sequence.replica = None

    def land_all(self) -> None:
        """No more results will come: what is known now is all there is."""
        for sequence in list(self._sequences.values()):
            self._land(sequence)

    def _land(self, sequence: Sequence) -> None:
        self.drop(sequence)
        sequence.become(sequence.at_rest)

    def match(self, flight: InFlight | None, result: StepResult) -> Arrival:
        """Find the rows that ``result`` answers, and check that it can be true. Changes nothing.

        Raises:
            ProtocolError: another step is due, rows are unknown or missing, or tokens have wrong indexes.
        """
        if flight is None or result.step != flight.step:
            due = "none" if flight is None else flight.step
            raise ProtocolError(f"a result for step {result.step} came, due is {due}")
        ids = result.sequence_ids
        if not len(ids) == len(result.token_ids) == len(result.token_indexes) == len(result.ends):
            raise ProtocolError(f"step {result.step}: the columns of the result differ in length")
        slots = flight.sample_slots
        if not same_ints(ids, flight.sample_ids):
            slots = self._match_some(flight, ids)
        running = self._table.ids[slots] == ids
        if np.count_nonzero(running) == len(ids):
            self._check_indexes(slots, result.token_indexes, result.ends)
            return Arrival(slots, None)
        self._check_indexes(slots[running], result.token_indexes[running], result.ends[running])
        self._check_landing(result)
        return Arrival(slots[running], running)

    def _match_some(self, flight: InFlight, ids: Int32Array) -> Slots:
        """Slots of the rows named by ``ids``. Only sequences that have ended may be left out."""
        present = np.isin(flight.sample_ids, ids)
        if not np.array_equal(flight.sample_ids[present], ids):
            raise ProtocolError(f"step {flight.step}: the result has rows that the plan has not, or in another order")
        absent_ids = flight.sample_ids[~present]
        absent = self._table.ids[flight.sample_slots[~present]] == absent_ids
        if absent.any() or any(each in self._sequences for each in absent_ids.tolist()):
            raise ProtocolError(f"step {flight.step}: the result lacks rows of sequences that have not ended")
        return flight.sample_slots[present]

    def _check_indexes(self, slots: Slots, indexes: Int32Array, ends: Int32Array) -> None:
        known = self._table.known[slots]
        if not same_ints(known - self._table.prompt[slots], indexes):
            raise ProtocolError("a token has another index than the one due")
        at_limit = known >= self._table.last[slots]
        if np.count_nonzero(at_limit) and np.count_nonzero(ends[at_limit] == END_NONE):
            raise ProtocolError("a sequence has reached its limit and did not end")

    def _check_landing(self, result: StepResult) -> None:
        for sequence_id, index in zip(result.sequence_ids.tolist(), result.token_indexes.tolist(), strict=True):
            sequence = self._sequences.get(sequence_id)
            if sequence and len(sequence.tokens) - len(sequence.request.prompt) != index:
                raise ProtocolError(f"token {index} of sequence {sequence_id} is not the one due")

    def confirm(self, flight: InFlight, list_blocks: Callable[[Slots], None] | None) -> None:
        """The step is done. Rows whose sequences are still in their slots may have full blocks to list."""
        self.landed = flight.step
        if list_blocks is not None:
            same = self._table.ids[flight.slots] == flight.ids
            list_blocks(flight.slots if np.count_nonzero(same) == len(same) else flight.slots[same])

    def take(self, arrival: Arrival, result: StepResult) -> list[tuple[Sequence, int]]:
        """Take in the sampled tokens; returns the sequences that ended with them, each with ``ends``."""
        table, slots = self._table, arrival.slots
        token_ids, indexes, ends = result.token_ids, result.token_indexes, result.ends
        ended: list[tuple[Sequence, int]] = []
        if arrival.running is not None:
            ended = self._take_landing(result, arrival.running)
            token_ids, indexes, ends = token_ids[arrival.running], indexes[arrival.running], ends[arrival.running]
        if table.num_beams:  # what a beam has sampled says nothing: its search chooses
            kept = ~table.beam[slots]
            slots, token_ids, indexes, ends = slots[kept], token_ids[kept], indexes[kept], ends[kept]
        table.take_tokens(slots, token_ids)
        for row in (indexes == 0).nonzero()[0].tolist():
            sequence = table.at(slots[row])
            sequence.produced = True
            sequence.request.first_token_s = sequence.request.first_token_s or result.done_s
        ended += [(table.at(slots[row]), int(ends[row])) for row in ends.nonzero()[0].tolist()]
        for sequence in [each for each in self._sequences.values() if each.last_step <= self.landed]:
            self._land(sequence)
        return ended

    def _take_landing(self, result: StepResult, running: NDArray[np.bool_]) -> list[tuple[Sequence, int]]:
        ended = []
        for row in np.flatnonzero(~running).tolist():
            sequence = self._sequences.get(int(result.sequence_ids[row]))
            if sequence is None or sequence.beam_group is not None:
                continue  # aborted or stopped meanwhile; or beams, which do this step again
            sequence.tokens.append(int(result.token_ids[row]))
            sequence.produced = True
            if result.ends[row] != END_NONE:
                ended.append((sequence, int(result.ends[row])))
        return ended

    def check_integrity(self) -> None:
        """Those who wait for results have results to come.

        Raises:
            AssertionError: they have not.
        """
        for sequence in self._sequences.values():
            assert sequence.state is State.PREEMPTED_IN_FLIGHT, f"landing sequence {sequence.id} is {sequence.state}"
            assert sequence.last_step > self.landed, f"sequence {sequence.id} has landed"
