"""Ranks whose regions all lie in the memory of one device: without GPUs their kernels run one part after the other."""

from __future__ import annotations

import torch

from pagebus.kernels.exchange.peers import HOST_WORDS, Layout, Limits, Peers

SMALL = Limits(push=8192, signal=16384, two_shot=32768, gather=2048)


class VirtualRanks:
    """``world`` ranks in the memory of ``device``; ``notes`` [N, 8] are what they leave for the host."""

    def __init__(
        self, world: int, device: torch.device, limits: Limits = SMALL, patience_ns: int = 2_000_000_000
    ) -> None:
        self.layout = Layout(world, limits)
        self.regions = [torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(world)]
        self.notes = torch.zeros((world, HOST_WORDS), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.peers = [self._peers(rank, device, patience_ns) for rank in range(world)]

    def _peers(self, rank: int, device: torch.device, patience_ns: int) -> Peers:
        self.layout.clear(self.regions[rank])
        addresses = [region.data_ptr() for region in self.regions] + [self.notes[rank].data_ptr()]
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        return Peers(rank, self.layout, table, self.layout.new_state(device), patience_ns)
