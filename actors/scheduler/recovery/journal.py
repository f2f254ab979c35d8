"""The journal that a scheduler leaves for its successor, and the reader for it.

Requests stay in the ``tokenized`` stream until they are over. Their tokens are in the results of the replicas. A
:class:`Checkpoint` sums up everything before a position in these, so that they can be trimmed. The other journal
entries record later events: the requests behind sequence ids, clients that moved, and requests that a scheduler failed
on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from pagebus.actors.scheduler.core import announcements
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.sequence_output import RowScore, Scores, SequenceOutput, row_scores
from pagebus.actors.scheduler.states import State
from pagebus.bus.contract import START, EntryId
from pagebus.bus.messages import (
    END_NONE,
    Checkpoint,
    Int32Array,
    RequestBlamed,
    RequestMoved,
    SequencesNamed,
    StepResult,
)


def checkpoint(
    core: Core,
    positions: Mapping[str, EntryId],
    epochs: Mapping[str, int],
    *,
    ingresses: Iterable[str],
    detokenizers: Iterable[str],
    blamed: Iterable[RequestBlamed] = (),
) -> Checkpoint:
    """Everything produced for live requests by results up to ``positions`` (by replica)."""
    requests = [*core.requests.values(), *core.delivery.finished.values()]
    for replica in core.replicas.values():
        for sequence in replica.slots.occupied():
            replica.slots.flush(sequence.slot)
    begun = [each for each in chain.from_iterable(request.sequences for request in requests) if _has_begun(each)]
    scores = [each.scores for each in begun]
    scored = [each for each in scores if len(each)]
    return Checkpoint(
        request_ids=tuple(each.request.id for each in begun),
        positions={replica: str(position) for replica, position in positions.items()},
        executor_epochs=dict(epochs),
        moved=tuple(announcements.moved(request) for request in requests if request.readers.newest.attempt),
        ingresses=tuple(ingresses),
        detokenizers=tuple(detokenizers),
        blamed=tuple(blamed),
        sequence_ids=np.array([each.id for each in begun], np.int32),
        choice_indexes=np.array([each.choice_index for each in begun], np.int32),
        lengths=np.array([len(each.tokens) - len(each.request.prompt) for each in begun], np.int32),
        ends=np.array([each.end for each in begun], np.int32),
        token_ids=_joined([memoryview(each.tokens)[len(each.request.prompt) :] for each in begun]),
        score_counts=np.array([len(each) for each in scores], np.int32),
        bits=_joined([each.bits for each in scored]),
        top_counts=_joined([each.top_counts for each in scored]),
        top_ids=_joined([each.top_ids for each in scored]),
        top_bits=_joined([each.top_bits for each in scored]),
    )


def _has_begun(sequence: Sequence) -> bool:
    """Whether its id may occur in results, or it has output."""
    known = len(sequence.tokens) > len(sequence.request.prompt)
    return known or sequence.entered or sequence.state in (State.PREEMPTED_IN_FLIGHT, State.ENDED)


def _joined(parts: Iterable[array[int] | memoryview]) -> Int32Array:
    """A copy, the only one."""
    return np.frombuffer(b"".join(parts), np.int32)


@dataclass(slots=True)
class Ledger:
    """The state that a predecessor left. Feed it the journal, then the results after :attr:`positions`, in any order of
    the replicas, then take :meth:`outputs`."""

    positions: dict[str, EntryId] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    ingresses: tuple[str, ...] = ()
    detokenizers: tuple[str, ...] = ()
    moved: dict[str, RequestMoved] = field(default_factory=dict)
    blamed: dict[str, RequestBlamed] = field(default_factory=dict)
    _names: dict[int, tuple[str, int]] = field(default_factory=dict)
    _outputs: dict[int, SequenceOutput] = field(default_factory=dict)
    _tokens: dict[int, dict[int, tuple[int, int, RowScore | None]]] = field(default_factory=dict)

    def read(self, entry: Checkpoint | SequencesNamed | RequestMoved | RequestBlamed) -> None:
        """Apply the next journal entry. A checkpoint replaces everything before it."""
        match entry:
            case RequestMoved(request_id=request_id):
                self.moved[request_id] = entry
            case RequestBlamed(request_id=request_id):
                self.blamed[request_id] = entry
            case SequencesNamed(replica=replica):
                self.epochs[replica] = entry.executor_epoch
                self.positions.setdefault(replica, START)
                columns = (entry.sequence_ids.tolist(), entry.request_ids, entry.choice_indexes.tolist())
                for sequence_id, request_id, choice_index in zip(*columns, strict=True):
                    self._names[sequence_id] = request_id, choice_index
            case Checkpoint():
                self._read_checkpoint(entry)

    def _read_checkpoint(self, entry: Checkpoint) -> None:
        self.positions = {replica: EntryId.parse(at) for replica, at in entry.positions.items()}
        self.epochs = dict(entry.executor_epochs)
        self.ingresses, self.detokenizers = entry.ingresses, entry.detokenizers
        self.moved = {moved.request_id: moved for moved in entry.moved}
        self.blamed = {blamed.request_id: blamed for blamed in entry.blamed}
        self._names.clear()
        self._outputs.clear()
        tokens, bits, counts = _Column(entry.token_ids), _Column(entry.bits), _Column(entry.top_counts)
        ids, top_bits = _Column(entry.top_ids), _Column(entry.top_bits)
        columns = (entry.sequence_ids, entry.choice_indexes, entry.lengths, entry.ends, entry.score_counts)
        rows = zip(entry.request_ids, *(column.tolist() for column in columns), strict=True)
        for request_id, sequence_id, choice_index, length, end, num_scores in rows:
            self._names[sequence_id] = request_id, choice_index
            top_counts = counts.take(num_scores)
            num_tops = sum(top_counts)
            scores = Scores(bits.take(num_scores), top_counts, ids.take(num_tops), top_bits.take(num_tops))
            self._outputs[sequence_id] = SequenceOutput(tokens.take(length), end, scores)

    def add_result(self, result: StepResult) -> None:
        """Add the tokens of one step. Sequences that the journal does not name belong to requests that are over."""
        scores = {score.row: score for score in row_scores(result)} if len(result.logprob_rows) else {}
        columns = (result.sequence_ids, result.token_indexes, result.token_ids, result.ends)
        for row, (sequence_id, index, token, end) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            if sequence_id in self._names:
                self._tokens.setdefault(sequence_id, {})[index] = token, end, scores.get(row)

    def outputs(self) -> dict[str, dict[int, SequenceOutput]]:
        """By request id and choice index, every output up to its first gap."""
        found: dict[str, dict[int, SequenceOutput]] = {}
        for sequence_id, (request_id, choice_index) in self._names.items():
            output = self._outputs.get(sequence_id) or SequenceOutput()
            later = self._tokens.get(sequence_id, {})
            while output.end == END_NONE and (row := later.get(len(output.tokens))) is not None:
                output.add(*row)
            choices = found.setdefault(request_id, {})
            known = choices.get(choice_index)
            if known is None or len(known.tokens) <= len(output.tokens):
                choices[choice_index] = output
        return found


class _Column:
    """Consumes a flat column in slices."""

    def __init__(self, values: Int32Array) -> None:
        self._values = values
        self._next = 0

    def take(self, count: int) -> array[int]:
        start, self._next = self._next, self._next + count
        return array("i", self._values[start : self._next].tobytes())
