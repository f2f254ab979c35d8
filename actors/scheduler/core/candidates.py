"""Replicas that may still give slots in one pass over the queue, and to which sequences."""

from __future__ import annotations

import numpy as np

from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.order import INTERACTIVE
from pagebus.actors.scheduler.request import Sequence


class Candidates:
    """One pass, in order. A sequence that is ``handed_over`` (ids; emptied here) needs a replica with a free slot, any
    other one that is open to its class."""

    def __init__(self, fleet: Fleet, handed_over: set[int]) -> None:
        self._fleet, self._handed_over = fleet, handed_over
        self._class = INTERACTIVE
        self._open: Rows = fleet.open[INTERACTIVE].copy()
        self._closed: Rows = np.zeros_like(self._open)
        self.is_over = False
        """Whether no later sequence can get a slot."""

    def of(self, sequence: Sequence) -> Rows:
        """The candidates for the next sequence; if there are none, it is passed over."""
        if sequence.request.priority_class != self._class:
            self._class = sequence.request.priority_class
            self._open &= self._fleet.open[self._class]
        goes_on = sequence.id in self._handed_over
        self._handed_over.discard(sequence.id)
        if not sequence.ready:
            if sequence.replica is not None and not goes_on:
                self.close(self._fleet.row(sequence.replica))
            return np.zeros_like(self._open)
        self.is_over = not goes_on and not self._handed_over and not np.count_nonzero(self._open)
        return self._fleet.free & ~self._closed if goes_on else self._open

    def close(self, rows: int | Rows) -> None:
        """No later sequence gets a slot of these replicas."""
        self._closed[rows] = True
        self._open[rows] = False

    def taken(self, row: int) -> None:
        """A slot of this replica was given away."""
        self._open[row] &= self._fleet.open[self._class, row]
