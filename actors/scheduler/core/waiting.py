"""The queue of sequences without a slot, in scheduling order (:mod:`pagebus.actors.scheduler.order`), and the queue of
jobs to promote.

A preempted sequence keeps its arrival, so it precedes everything of its priority that arrived later. The key of a
queued sequence must not change.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from pagebus.actors.scheduler.order import JOB, Key
from pagebus.actors.scheduler.request import Request, Sequence


class WaitingQueue:
    """A sorted list. Insertion and removal are a binary search and one memory move, also with 10,000 waiting."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._sequences: dict[Key, Sequence] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        """From first to last. The queue must not change meanwhile."""
        return map(self._sequences.__getitem__, self._keys)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence.

        Raises:
            ValueError: it is queued already.
        """
        if sequence.key in self._sequences:
            raise ValueError(f"sequence {sequence.id} waits already")
        insort(self._keys, sequence.key)
        self._sequences[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence.

        Raises:
            KeyError: it is not queued.
        """
        del self._sequences[sequence.key]
        del self._keys[bisect_left(self._keys, sequence.key)]

    def check_integrity(self) -> None:
        """The order holds, no sequence is queued twice, and all are in a waiting state.

        Raises:
            AssertionError: it is not so.
        """
        assert self._keys == sorted(self._sequences), "keys and sequences differ"
        for key, sequence in self._sequences.items():
            assert sequence.key == key, f"sequence {sequence.id} waits under a wrong key"
            assert sequence.is_queued, f"sequence {sequence.id} is {sequence.state}"
            assert sequence.slot == -1, f"waiting sequence {sequence.id} has a slot"
            assert not sequence.pages, f"waiting sequence {sequence.id} holds blocks"


class JobQueue:
    """Jobs that have not been promoted, by deadline."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._keys: list[tuple[float, str]] = []
        self._requests: dict[tuple[float, str], Request] = {}
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, request: Request) -> None:
        """Insert a job."""
        key = request.deadline_s, request.id
        insort(self._keys, key)
        self._requests[key] = request

    def discard(self, request: Request) -> None:
        """Remove a request; nothing happens if it is no job."""
        key = request.deadline_s, request.id
        if self._requests.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def pop_due(self, now_s: float) -> Request | None:
        """Remove and return the job to promote now, if there is one."""
        if not self._keys or self._keys[0][0] > now_s or now_s < self._next_s:
            return None
        self._next_s = now_s + self._aging_s
        return self._requests.pop(self._keys.pop(0))

    def check_integrity(self) -> None:
        """The order holds, and all entries are live jobs.

        Raises:
            AssertionError: it is not so.
        """
        assert self._keys == sorted(self._requests), "keys and jobs differ"
        for (deadline_s, name), request in self._requests.items():
            assert (request.deadline_s, request.id) == (deadline_s, name), f"job {name} is listed under a wrong key"
            assert request.priority_class == JOB, f"job {name} was promoted"
            assert request.num_live, f"job {name} is over"
