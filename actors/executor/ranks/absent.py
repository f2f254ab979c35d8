"""Ranks that are not there, where shapes suffice: kernels are compiled, explained and tuned without the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from pagebus.actors.executor.ranks.peers import PeerComm
from pagebus.kernels.exchange.peers import FAILED, Layout, Peers

META = torch.device("meta")


class AbsentRanks(PeerComm):
    """One rank alone, whose exchanges are launched on ``device``: they wait for nobody, and what they tell goes to
    memory of its own."""

    def __init__(self, rank: int, size: int, device: torch.device = META) -> None:
        self.rank, self.size, self._nccl = rank, size, None
        self._device, self._known = device, set()
        self._layout = layout = Layout(size)
        self._region = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        address = 0 if device.type == "meta" else self._region.data_ptr()
        table, state = torch.full((size + 1,), address, dtype=torch.int64, device=device), layout.new_state(device)
        state[FAILED] = 1  # nothing waits
        self._peers = Peers(rank, layout, table, state)

    def connect(self) -> None:
        """There is nobody to meet."""

    def _load(self, key: Hashable, run: Callable[[Peers], object]) -> None:
        """All forms of a kind are launched at its first call, as where there are ranks."""
        if key not in self._known:
            self._known.add(key)
            run(self.peers)

    def close(self) -> None:
        """There is nobody to leave."""
