"""Locked host memory: pieces are locked once, and used again when nothing refers to them."""

from __future__ import annotations

import pytest
import torch

from pagebus.actors.executor.adapters.pinned import GRAIN_BYTES, PinnedMemory


class Locks:
    """What is locked, as ranges of addresses."""

    def __init__(self) -> None:
        self.ranges: list[range] = []

    def lock(self, address: int, num_bytes: int) -> bool:
        self.ranges.append(range(address, address + num_bytes))
        return True

    def unlock(self, address: int) -> None:
        (found,) = (each for each in self.ranges if each.start == address)
        self.ranges.remove(found)

    def holds(self, piece: torch.Tensor) -> bool:
        first, last = piece.data_ptr(), piece.data_ptr() + len(piece) - 1
        return any(first in each and last in each for each in self.ranges)


def test_a_piece_is_used_again_once_its_views_are_gone() -> None:
    """A copy to the device may still refer to a view when the adapter has left."""
    locks = Locks()
    memory = PinnedMemory(locks.lock, locks.unlock)
    first, second = memory.take(GRAIN_BYTES + 1), memory.take(GRAIN_BYTES + 2)
    assert [len(first), len(second)] == [GRAIN_BYTES + 1, GRAIN_BYTES + 2]
    assert locks.holds(first)
    assert locks.holds(second)
    assert len(locks.ranges) == 2
    first.fill_(7)
    view, address = first.view(torch.int8)[5:], first.data_ptr()
    del first
    third = memory.take(GRAIN_BYTES + 1)
    assert len(locks.ranges) == 3
    assert third.data_ptr() != address
    assert view.eq(7).all()
    del view
    assert memory.take(2 * GRAIN_BYTES).data_ptr() == address, "sizes are rounded up"
    assert len(locks.ranges) == 3
    memory.take(GRAIN_BYTES)
    assert len(locks.ranges) == 4


def test_no_more_can_be_locked() -> None:
    with pytest.raises(MemoryError, match="locks no more memory"):
        PinnedMemory(lambda _address, _num_bytes: False).take(1)


def test_no_memory_is_given_back_locked() -> None:
    """The driver would take whatever the system gives there next for what it locked."""
    locks = Locks()
    memory = PinnedMemory(locks.lock, locks.unlock)
    kept = memory.take(1)
    memory.take(GRAIN_BYTES + 1)
    del memory
    assert len(locks.ranges) == 1
    assert locks.holds(kept)
    del kept
    assert not locks.ranges
