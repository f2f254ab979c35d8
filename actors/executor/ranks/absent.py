"""Ranks that are not there, where shapes suffice: kernels are compiled, and explained, without the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from pagebus.actors.executor.ranks.peers import PeerComm
from pagebus.kernels.exchange.peers import Layout, Peers

META = torch.device("meta")


class AbsentRanks(PeerComm):
    """One rank alone, whose exchanges are launched on the meta device."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self._nccl = rank, size, None
        self._device, self._known = META, set()
        self._layout = layout = Layout(size)
        table = torch.empty(size + 1, dtype=torch.int64, device=META)
        self._peers = Peers(rank, layout, table, layout.new_state(META))

    def connect(self) -> None:
        """There is nobody to meet."""

    def _load(self, key: Hashable, run: Callable[[Peers], object]) -> None:
        """All forms of a kind are launched at its first call, as where there are ranks."""
        if key not in self._known:
            self._known.add(key)
            run(self.peers)

    def close(self) -> None:
        """There is nobody to leave."""
