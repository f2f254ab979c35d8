"""Output of a sequence as messages carry it: tokens, and log probabilities if requested."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pagebus.bus.messages import END_NONE, Int32Array, StepResult


def _ints() -> array[int]:
    return array("i")


@dataclass(slots=True)
class Scores:
    """Log probabilities of a sequence's first output tokens, as bits of float32: ``bits`` of each token, and for each
    ``top_counts`` entries of ``top_ids`` and ``top_bits``."""

    bits: array[int] = field(default_factory=_ints)
    top_counts: array[int] = field(default_factory=_ints)
    top_ids: array[int] = field(default_factory=_ints)
    top_bits: array[int] = field(default_factory=_ints)

    def __len__(self) -> int:
        return len(self.bits)

    def add(self, score: RowScore) -> None:
        """Append the score of the next token."""
        self.bits.append(score.bits)
        self.top_counts.append(len(score.top_ids))
        self.top_ids.frombytes(score.top_ids.tobytes())
        self.top_bits.frombytes(score.top_bits.tobytes())


@dataclass(slots=True)
class SequenceOutput:
    """The output of one sequence: ``tokens``, how they ended, and the scores so far."""

    tokens: array[int] = field(default_factory=_ints)
    end: int = END_NONE
    scores: Scores = field(default_factory=Scores)

    def add(self, token: int, end: int, score: RowScore | None) -> None:
        """Append the next token; its score only if those of all before it are there."""
        if score is not None and len(self.scores) == len(self.tokens):
            self.scores.add(score)
        self.tokens.append(token)
        self.end = end


@dataclass(frozen=True, slots=True)
class RowScore:
    """Log probabilities of one token of a result. ``row`` is its place in the result's columns."""

    row: int
    bits: int
    top_ids: Int32Array
    top_bits: Int32Array


def row_scores(result: StepResult) -> Iterator[RowScore]:
    """The log probabilities in a result, by ascending row."""
    ends = np.cumsum(result.top_counts).tolist()
    starts = [0, *ends]
    for row, bits, start, end in zip(
        result.logprob_rows.tolist(), result.logprob_bits.tolist(), starts, ends, strict=False
    ):
        yield RowScore(row, bits, result.top_ids[start:end], result.top_bits[start:end])
