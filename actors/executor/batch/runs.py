"""Runs: the samples of rows that verify drafts. How many of them count is known only behind the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagebus.bus.messages import Int32Array

BoolArray = NDArray[np.bool_]
TOLD = 3
"""Numbers that the device tells of a run behind the step's tokens: how many count, the output index of the first, and
how many drafts are ready behind the last."""


@dataclass(slots=True)
class Runs:
    """The M rows of a step that sample, with N samples in total. ``starts`` [M + 1]: where those of each begin.
    ``last_indexes`` and ``min_tokens`` [M]: the output index of the last token that the sequence may have, and the
    first that may be an end token. ``told_drafts``: of each run so many drafts are told, if some follow a grammar.
    ``guessed``: the drafts [M, told_drafts] that a head has guessed for the step itself; waits until they are there.
    ``can_verify``, any thread: whether steps with drafts are as quick as they will be; until then none are offered."""

    starts: Int32Array
    last_indexes: Int32Array
    min_tokens: Int32Array
    exact: bool = False
    """Whether all rows begin where they were laid out."""
    told_drafts: int = 0
    guessed: Callable[[], Int32Array] | None = None
    can_verify: Callable[[], bool] | None = None

    def __len__(self) -> int:
        return len(self.last_indexes)

    @property
    def are_single(self) -> bool:
        """Whether each is one sample."""
        return int(self.starts[-1]) == len(self)

    @property
    def num_told(self) -> int:
        """How many numbers the device tells."""
        return (TOLD + self.told_drafts) * len(self)

    def tell_drafts(self, num_drafts: int) -> None:
        """Have the device tell so many drafts of each run: the host has to know them, to make masks of grammars."""
        self.told_drafts = num_drafts

    def guess(self, fetch: Callable[[], Int32Array]) -> None:
        """A head has guessed the drafts of the step itself; ``fetch`` waits for them."""
        self.guessed = fetch

    def offer_once(self, can_verify: Callable[[], bool]) -> None:
        """Offer drafts only once ``can_verify`` says that steps with drafts are quick."""
        self.can_verify = can_verify

    def drafts(self, told: Int32Array) -> Int32Array:
        """Of what the device has told [num_told] the drafts behind each run [M, told_drafts], of which ``num_drafts``
        of its samples exist."""
        return told[TOLD * len(self) :].reshape(len(self), self.told_drafts)

    def read(self, told: Int32Array) -> ToldRuns:
        """The rest of what the device has told [num_told]."""
        counts, firsts, found = told[: TOLD * len(self)].reshape(TOLD, len(self))
        if self.can_verify is not None and np.count_nonzero(found) and not self.can_verify():
            found = np.zeros_like(found)
        if self.are_single:
            ended, can_stop = firsts >= self.last_indexes, firsts >= self.min_tokens
            return ToldRuns(firsts, None, ended, can_stop, found, self.starts[:-1])
        of_samples = np.repeat(np.arange(len(self)), np.diff(self.starts))
        places = np.arange(len(of_samples), dtype=np.int32) - self.starts[of_samples]
        indexes = (firsts[of_samples] + places).astype(np.int32)
        return ToldRuns(
            indexes=indexes,
            rejected=places >= counts[of_samples],
            length_ended=indexes >= self.last_indexes[of_samples],
            can_stop=indexes >= self.min_tokens[of_samples],
            num_drafts=found[of_samples],
            begins=self.starts[of_samples],
        )


@dataclass(slots=True)
class ToldRuns:
    """By sample [N]: its output index; whether a draft before it was ``rejected``, None where there were none; whether
    its sequence has all its tokens with it, and whether an end token may stand there; the drafts that are ready behind
    its run; and where its run begins."""

    indexes: Int32Array
    rejected: BoolArray | None
    length_ended: BoolArray
    can_stop: BoolArray
    num_drafts: Int32Array
    begins: Int32Array

    def surplus(self, ends: Int32Array) -> BoolArray | None:
        """Samples that are no part of the output: rejected ones, and those behind the first end [N] of their run. None:
        there cannot be any."""
        if self.rejected is None:
            return None
        ended = (ends != 0) & ~self.rejected
        before = np.cumsum(ended) - ended
        surplus: BoolArray = self.rejected | (before > before[self.begins])
        return surplus
