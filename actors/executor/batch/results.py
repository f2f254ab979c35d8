"""Builds a step's result from its sampled tokens: the sequences that end, and the tokens that come too late."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagebus.actors.executor.batch.logprob_rows import result_columns
from pagebus.actors.executor.batch.step_work import BoolArray, StepWork
from pagebus.actors.executor.device.errors import EngineError
from pagebus.bus.messages import END_GRAMMAR, END_LENGTH, END_STOP, Int32Array, StepResult
from pagebus.bus.messages.field_types import no_ints


class ResultBuilder:
    """Builds the results of one executor, in step order.

    With pipelined steps a sequence's next rows are planned before its end is known. The end is therefore latched per
    slot, with the sequence's id: later rows of that sequence are dropped, until another one takes the slot.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._ended = np.zeros(max_num_seqs + 1, np.int32)
        self._vocab_size = vocab_size
        self._epoch = 0

    def build(
        self,
        work: StepWork,
        tokens: Int32Array,
        *,
        step: int,
        scheduler_epoch: int,
        received_s: float,
        launched_s: float,
        done_s: float,
        copied_step: int = 0,
        busy_s: float = 0.0,
    ) -> StepResult:
        """The result of ``work``, whose N sampled ``tokens`` are [N]; times are seconds of the wall clock.

        Raises:
            EngineError: a token lies outside the vocabulary, so the device computed nonsense.
        """
        self._forget_ended(work, scheduler_epoch)
        told = None if work.runs is None else work.runs.read(tokens[len(work.positions) :])
        if told is not None:
            tokens = tokens[: len(work.positions)]
            work.resolve(told)
        if len(tokens) and np.maximum.reduce(tokens.view(np.uint32)) >= self._vocab_size:  # negative ones: the largest
            raise EngineError(f"step {step} sampled a token outside the vocabulary of {self._vocab_size}")
        sequence_ids, indexes, ends = work.sequence_ids, work.indexes, _ends(work, tokens)
        surplus = None if told is None else told.surplus(ends)
        if surplus is not None:
            ends[surplus] = 0
        late = self._latch(work, ends)
        if surplus is not None:
            late |= surplus
        if np.count_nonzero(late):
            kept = ~late
            sequence_ids, tokens, indexes, ends = sequence_ids[kept], tokens[kept], indexes[kept], ends[kept]
        return StepResult(
            step=step,
            scheduler_epoch=scheduler_epoch,
            received_s=received_s,
            launched_s=launched_s,
            done_s=done_s,
            num_computed_tokens=work.num_tokens,
            sequence_ids=sequence_ids,
            token_ids=tokens,
            token_indexes=indexes,
            ends=ends,
            copied_step=copied_step,
            busy_s=busy_s,
            num_drafts=no_ints() if told is None else told.num_drafts[~late],
            **({} if work.logprob_rows is None else result_columns(work.logprob_rows, late)),
        )

    def _forget_ended(self, work: StepWork, scheduler_epoch: int) -> None:
        """Forget ends of sequences that begin anew: of another scheduler's, and of those that enter with this step."""
        if scheduler_epoch != self._epoch:  # another scheduler reuses ids
            self._epoch = scheduler_epoch
            self._ended.fill(0)
        if work.new_slots:  # perhaps a sequence that ended here and repeats its last step
            self._ended[work.new_slots] = 0

    def _latch(self, work: StepWork, ends: Int32Array) -> BoolArray:
        """Record which sequences end; returns a mask of rows [N] whose sequences had ended before."""
        late: BoolArray = self._ended.take(work.sample_slots) == work.sequence_ids
        if np.count_nonzero(ends):
            ended = ends != 0
            self._ended[work.sample_slots[ended]] = work.sequence_ids[ended]
        return late


def _ends(work: StepWork, tokens: Int32Array) -> Int32Array:
    """How each row's [N] sequence ends with this token, see ``StepResult.ends``."""
    ends = np.zeros(len(tokens), np.int32)
    if len(tokens):
        ends[work.length_ended] = END_LENGTH
        stopped = np.logical_or.reduce(tokens[:, None] == work.end_ids, axis=1)
        stopped &= work.can_stop
        ends[stopped] = END_STOP
        ends[work.broken] = END_GRAMMAR
    return ends


def without_rows(work: StepWork, tokens: Int32Array, **told: Any) -> StepResult:
    """The result of a stage whose step another one ends, with what was ``told`` of the step alone."""
    return StepResult(num_computed_tokens=work.num_tokens, **told)
