"""Runs: the tokens that one step has sampled for a sequence whose drafts it accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.events import ProtocolError
from pagebus.actors.scheduler.replica.slots import Slots
from pagebus.bus.messages import Int32Array, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of a result's rows [n]: the first row of each and how many there are, ``firsts`` and ``counts`` [m]."""

    firsts: Int32Array
    counts: Int32Array

    @classmethod
    def of(cls, result: StepResult) -> Runs:
        """Neighbouring rows of one sequence are a run.

        Raises:
            ProtocolError: the tokens of one do not follow each other, or drafts are not told.
        """
        ids, indexes = result.sequence_ids, result.token_indexes
        firsts, counts = _split(ids)
        follows = ids[1:] == ids[:-1]
        if np.count_nonzero(indexes[1:][follows] != indexes[:-1][follows] + 1):
            raise ProtocolError(f"step {result.step}: the tokens of a run do not follow each other")
        if len(result.num_drafts) != len(ids):
            raise ProtocolError(f"step {result.step}: the result does not tell the drafts of its rows")
        runs = cls(firsts, counts)
        if np.count_nonzero(result.ends) > np.count_nonzero(result.ends[runs.lasts]):
            raise ProtocolError(f"step {result.step}: a sequence has tokens behind its end")
        return runs

    def where(self, mask: NDArray[np.bool_]) -> Runs:
        """The runs in ``mask`` [m]."""
        return Runs(self.firsts[mask], self.counts[mask])

    @property
    def lasts(self) -> Int32Array:
        """The last row of each run [m]."""
        return self.firsts + self.counts - 1


def turns(slots: Slots) -> list[Int32Array]:
    """The rows of ``slots`` [n], in which equal neighbours are a run, in parts that have no slot twice: the first rows
    of all runs, then their second rows, and so on."""
    firsts, counts = _split(slots)
    return [firsts[counts > place] + np.int32(place) for place in range(int(counts.max(initial=0)))]


def _split(values: Slots) -> tuple[Int32Array, Int32Array]:
    """Where runs of equal values begin, and how long they are."""
    begins = np.ones(len(values), np.bool_)
    begins[1:] = values[1:] != values[:-1]
    firsts = np.flatnonzero(begins).astype(np.int32)
    return firsts, np.diff(firsts, append=np.int32(len(values))).astype(np.int32)
