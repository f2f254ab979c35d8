"""Adapters in one pass of admission: which sequences may run where, and which adapters are loaded for the others.

A sequence whose adapter no executor has in memory is passed over, and the replica with the least load loads the
adapter. That never drops an adapter of a sequence in front of it. If the most adapters that may run there are running,
the one with the fewest tokens left is *drained*: no sequence behind the waiting one gets a slot with it. Its tokens
left then only fall from pass to pass, so its turn ends and no sequence starves. A sequence whose adapter finds no free
blocks waits for them in line, as it does for its own.
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
        """The drained adapter, by row of a replica on which no further adapter may run."""
        self._asked: set[str] = set()
        """Adapters of the sequences so far."""
        self._num_passed = 0

    @property
    def is_over(self) -> bool:
        """Whether enough have been passed over."""
        return self._num_passed >= MOST_PASSED

    def must_wait(self, sequence: Sequence, rows: Rows) -> bool:
        """Whether the sequence's adapter may run on none of these replicas, and is being read or drained for already.
        Hundreds may wait like this, so admission asks it first."""
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
        """Those of the ``able`` replicas on which the sequence's adapter may run. If there is none, one loads it."""
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
    """For each adapter in use, the most tokens that a sequence with it may still get."""
    left: dict[str, int] = {}
    for sequence in replica.slots.occupied():
        if digest := sequence.request.digest:
            rest = sequence.limit - int(replica.slots.total[sequence.slot])
            left[digest] = max(left.get(digest, 0), rest)
    return left
