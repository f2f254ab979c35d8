"""What graphs of a draft head hold: one pass that guesses, or what follows a step.

Each reads and writes device memory at fixed addresses alone, so it is one graph for any sequences, and any positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagebus.actors.executor.batch.buckets import Bucket, Buckets


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess for each of at most ``rows`` sequences, and the state from which the same pass guesses what is behind."""

    rows: int


@dataclass(frozen=True, slots=True)
class Follow:
    """What the head does behind a step that is padded to ``rows`` rows with ``tokens`` tokens in total."""

    rows: int
    tokens: int


HeadPass = Guess | Follow


class Head(Protocol):
    """What is captured, as :class:`~pagebus.actors.executor.step.head_drafts.HeadDrafts` makes it."""

    def run(self, wanted: HeadPass) -> None: ...


def follow_of(bucket: Bucket) -> Follow:
    """What a head does behind a step padded to ``bucket``, with adapters or without."""
    return Follow(bucket.rows, bucket.tokens)


def head_passes(buckets: Buckets, *, follows: bool = True) -> list[HeadPass]:
    """All that are captured sooner or later; of a head that ``follows`` steps those too."""
    whole = [bucket for bucket in (*buckets.first(), *buckets.later()) if not bucket.pieces]
    guesses = [Guess(rows) for rows in reversed(buckets.row_sizes())]
    return [*guesses, *dict.fromkeys(map(follow_of, whole if follows else ()))]


def covering_guesses(buckets: Buckets) -> list[Guess]:
    """Guesses that together launch every kernel: for powers of two, and for the most rows."""
    sizes = buckets.row_sizes()
    return [Guess(rows) for rows in reversed(sizes) if rows & (rows - 1) == 0 or rows == sizes[-1]]
