"""What a scheduler leaves for its successor, and how that one reads it.

The requests themselves lie in the ``tokenized`` stream until they are over. Their tokens lie in the results of the
replicas; a :class:`Checkpoint` now and then sums up what there was before a position in these, so that they can be
trimmed. The rest of the journal says what came after it: what sequence ids stand for, clients that have moved, and the
request that a scheduler has failed at.
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
    """All that has been produced for requests that are not over, by results up to ``positions`` (by replica)."""
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
    """Its id may occur in results, or its output is more than nothing."""
    known = len(sequence.tokens) > len(sequence.request.prompt)
    return known or sequence.entered or sequence.state in (State.PREEMPTED_IN_FLIGHT, State.ENDED)


def _joined(parts: Iterable[array[int] | memoryview]) -> Int32Array:
    """A copy, the only one."""
    return np.frombuffer(b"".join(parts), np.int32)


@dataclass(slots=True)
class Ledger:
    """The state a predecessor left: feed it the journal, then the results after :attr:`positions`, in any order of the
    replicas, and take :meth:`outputs`."""

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
        """The next entry of the journal. A checkpoint replaces everything before it."""
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
            output = self._outputs[sequence_id] = SequenceOutput(tokens.take(length), end)
            top_counts = counts.take(num_scores)
            num_tops = sum(top_counts)
            output.scores = Scores(bits.take(num_scores), top_counts, ids.take(num_tops), top_bits.take(num_tops))

    def add_result(self, result: StepResult) -> None:
        """Tokens of one step. Those of sequences that nobody named belong to requests that are over."""
        scores = {score.row: score for score in row_scores(result)} if len(result.logprob_rows) else {}
        columns = (result.sequence_ids, result.token_indexes, result.token_ids, result.ends)
        for row, (sequence_id, index, token, end) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            if sequence_id in self._names:
                self._tokens.setdefault(sequence_id, {})[index] = token, end, scores.get(row)

    def outputs(self) -> dict[str, dict[int, SequenceOutput]]:
        """By request id and choice index, every output as far as it goes without a gap."""
        found: dict[str, dict[int, SequenceOutput]] = {}
        for sequence_id, (request_id, choice_index) in self._names.items():
            output = self._outputs.get(sequence_id) or SequenceOutput()
            later = self._tokens.get(sequence_id, {})
            while output.end == END_NONE and (row := later.get(len(output.tokens))) is not None:
                token, output.end, score = row
                if score is not None and len(output.scores) == len(output.tokens):
                    output.scores.add(score)
                output.tokens.append(token)
            choices = found.setdefault(request_id, {})
            known = choices.get(choice_index)
            if known is None or len(known.tokens) <= len(output.tokens):
                choices[choice_index] = output
        return found


class _Column:
    """Takes a flat column apart."""

    def __init__(self, values: Int32Array) -> None:
        self._values = values
        self._next = 0

    def take(self, count: int) -> array[int]:
        start, self._next = self._next, self._next + count
        return array("i", self._values[start : self._next].tobytes())
