"""Sequences without a slot, in the order in which they get one (:mod:`pagebus.actors.scheduler.order`), and jobs to
promote.

A preempted sequence keeps its arrival, so it comes back before everything of its priority that arrived later. A key may
not change while its sequence is in here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from pagebus.actors.scheduler.order import JOB, Key
from pagebus.actors.scheduler.request import Request, Sequence


class WaitingQueue:
    """A sorted list: insertion and removal are a binary search and one memory move, also with 10,000 waiting."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._sequences: dict[Key, Sequence] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        """First to last; the list must not change meanwhile."""
        return map(self._sequences.__getitem__, self._keys)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place.

        Raises:
            ValueError: it waits already.
        """
        if sequence.key in self._sequences:
            raise ValueError(f"sequence {sequence.id} waits already")
        insort(self._keys, sequence.key)
        self._sequences[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            KeyError: it does not wait.
        """
        del self._sequences[sequence.key]
        del self._keys[bisect_left(self._keys, sequence.key)]

    def check_integrity(self) -> None:
        """The order holds, nobody waits twice, and all are in a waiting state.

        Raises:
            AssertionError: it is not so.
        """
        assert self._keys == sorted(self._sequences), "keys and sequences differ"
        for key, sequence in self._sequences.items():
            assert sequence.key == key, f"sequence {sequence.id} waits under a wrong key"
            assert sequence.is_queued, f"sequence {sequence.id} is {sequence.state}"
            assert sequence.slot == -1, f"waiting sequence {sequence.id} has a slot"
            assert not sequence.blocks, f"waiting sequence {sequence.id} holds blocks"


class JobQueue:
    """The jobs that have not been promoted, first due first."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._keys: list[tuple[float, str]] = []
        self._requests: dict[tuple[float, str], Request] = {}
        self._next_s = -math.inf

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, request: Request) -> None:
        """A job has arrived."""
        key = request.deadline_s, request.id
        insort(self._keys, key)
        self._requests[key] = request

    def discard(self, request: Request) -> None:
        """A request has ended; nothing happens if it is no job."""
        key = request.deadline_s, request.id
        if self._requests.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def pop_due(self, now_s: float) -> Request | None:
        """The job to promote now, if there is one: it is no job any more then."""
        if not self._keys or self._keys[0][0] > now_s or now_s < self._next_s:
            return None
        self._next_s = now_s + self._aging_s
        return self._requests.pop(self._keys.pop(0))

    def check_integrity(self) -> None:
        """The order holds, and all are jobs that live.

        Raises:
            AssertionError: it is not so.
        """
        assert self._keys == sorted(self._requests), "keys and jobs differ"
        for (deadline_s, name), request in self._requests.items():
            assert (request.deadline_s, request.id) == (deadline_s, name), f"job {name} is listed under a wrong key"
            assert request.priority_class == JOB, f"job {name} was promoted"
            assert request.num_live, f"job {name} is over"
