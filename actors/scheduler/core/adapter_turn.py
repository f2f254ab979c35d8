"""Adapters in one pass of admission: who may run where, and what has to be loaded for those who may not.

A sequence whose adapter no executor has in memory is passed over, and its adapter is wanted on the replica with the
least load. Adapters of those in front of it are not dropped for that. If as many adapters have sequences there as may,
the one with the fewest tokens left is *drained*: nobody behind the waiting sequence gets a slot with it. What it has
left then only falls from pass to pass, so its turn ends, and nobody starves. A sequence whose adapter finds no blocks
waits for them as it does for its own: in line.
"""

from __future__ import annotations

import numpy as np

from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

MOST_PASSED = 1024
"""Admission stops for this plan after so many sequences without their adapters."""


class AdapterTurn:
    """One pass over the queue, in order."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._drained: dict[int, str] = {}
        """By row of a replica on which no more adapters may have sequences."""
        self._asked: set[str] = set()
        """Those of sequences so far."""
        self._num_passed = 0

    @property
    def is_over(self) -> bool:
        """Whether enough have been passed over."""
        return self._num_passed >= MOST_PASSED

    def must_wait(self, sequence: Sequence, rows: Rows) -> bool:
        """Whether it may have its adapter on none of these replicas, and all is done about that that can be. Hundreds
        may wait so: it is asked before anything else is looked at."""
        digest, replicas = sequence.request.digest, self._fleet.replicas
        is_read, knowing = False, list[int]()
        for row in rows.nonzero()[0].tolist():
            adapters, is_drained = replicas[row].adapters, self._drained.get(row) == digest
            if adapters.may_run(digest) and not is_drained:
                return False
            is_read = is_read or adapters.is_read(digest)
            if adapters.is_known(digest):
                knowing.append(row)
        waits = is_read or (bool(knowing) and all(row in self._drained for row in knowing))
        if waits:
            self._asked.add(digest)
            self._num_passed += 1
        return waits

    def having(self, sequence: Sequence, able: Rows) -> Rows:
        """Those of the ``able`` replicas on which the sequence may have its adapter. If there is none, one loads it."""
        digest, replicas = sequence.request.digest, self._fleet.replicas
        ready: Rows = np.zeros(len(able), np.bool_)
        rows = np.flatnonzero(able).tolist()
        self._asked.add(digest)
        for row in rows:
            ready[row] = replicas[row].adapters.may_run(digest)
        if not np.count_nonzero(ready):
            self._num_passed += 1
            self._want(sequence, rows)
        for row, drained in self._drained.items():
            ready[row] &= drained != digest
        return ready

    def _want(self, sequence: Sequence, rows: list[int]) -> None:
        adapter, replicas = sequence.request.adapter, self._fleet.replicas
        assert adapter is not None
        rows = [row for row in rows if replicas[row].adapters.capacity]
        if not rows or any(replicas[row].adapters.is_read(adapter.digest) for row in rows):
            return
        knowing = [row for row in rows if replicas[row].adapters.is_known(adapter.digest)]
        row = min(knowing or rows, key=self._fleet.load[sequence.request.priority_class].__getitem__)
        if not knowing and replicas[row].adapters.want(adapter, self._asked):
            self._fleet.touch(replicas[row])
            return
        left = {} if row in self._drained else _tokens_left(replicas[row])
        if left:
            self._drained[row] = min(left, key=left.__getitem__)


def _tokens_left(replica: Replica) -> dict[str, int]:
    """Of each adapter in use: the most tokens that a sequence with it may still take."""
    left: dict[str, int] = {}
    for sequence in replica.slots.occupied():
        if digest := sequence.request.digest:
            rest = sequence.limit - int(replica.slots.total[sequence.slot])
            left[digest] = max(left.get(digest, 0), rest)
    return left
