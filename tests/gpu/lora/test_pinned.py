"""Locked memory of adapters on a GPU's host."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from pagebus.actors.executor.adapters.pinned import PinnedMemory
from pagebus.actors.executor.memory.host_memory import lock_pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE = 5 << 20
ROUNDS = 20


def test_devices_copy_from_it() -> None:
    """Also from what another thread took, and what was used before. When all is gone it is unlocked: whatever comes to
    lie there can be locked again."""
    for _ in range(3):
        memory, found = PinnedMemory(partial(lock_pages, device=torch.device("cuda", 0))), list[torch.Tensor]()
        thread = threading.Thread(target=lambda taken=found.append, take=memory.take: taken(take(SIZE)))
        thread.start()
        thread.join()
        address = found[0].data_ptr()
        for number in range(ROUNDS):
            piece = found.pop()
            assert piece.is_pinned()
            assert piece.data_ptr() == address
            there = piece.fill_(number).to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            assert there.eq(number).all()
            del piece
            found.append(memory.take(SIZE))
