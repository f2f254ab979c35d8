"""Sequences without a slot, in the order in which they get one (:mod:`actors.scheduler.order`).

A preempted sequence keeps its arrival, so it comes back before everything of its priority that arrived later. A key may
not change while its sequence is in here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from actors.scheduler.order import Key
from actors.scheduler.sequence import Sequence, State


class Waiting:
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
            assert sequence.state in (State.WAITING, State.LANDING), f"sequence {sequence.id} is {sequence.state}"
            assert sequence.slot == -1, f"waiting sequence {sequence.id} has a slot"
            assert not sequence.blocks, f"waiting sequence {sequence.id} holds blocks"
