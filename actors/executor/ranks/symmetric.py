"""Memory of a GPU that the other ranks of the host can write to: the one place that knows torch's symmetric memory.

Its interface is not stable. What is used exists in torch 2.11 and 2.13: an allocation outside the caching allocator,
and a meeting at which each rank maps the memory of all others. Some releases look the ranks up in a process group,
others in what ``set_group_info`` was told, so both are told here. Nothing is ever freed: that would wait for the
device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from pagebus.actors.executor.ranks.links import avoid_multicast

DISTRIBUTED: Any = torch.distributed


class SymmetricMemory:
    """``num_bytes`` of ``device``, of which every rank has as many."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        avoid_multicast()
        self._torch: Any = torch._C._distributed_c10d
        self._native: Any = self._torch._SymmetricMemory
        self._device = device
        self._handle: Any = None
        self.own: torch.Tensor = self._native.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        """This rank's, uint8 [num_bytes]."""

    def meet(self, store: Any, rank: int, size: int, name: str) -> list[int]:
        """Map the memory of all ranks, which do this at the same time; addresses in their order.

        Args:
            store: which only this meeting uses.
            name: of the group, unique in this process.

        Raises:
            RuntimeError: the memory of some rank cannot be reached, or multicast is on.
        """
        group = DISTRIBUTED.ProcessGroup(store, rank, size)
        group._set_group_name(name)
        self._torch._register_process_group(name, group)
        self._native.set_group_info(name, rank, size, store)
        self._handle = self._native.rendezvous(self.own, name)
        if self._handle.multicast_ptr != 0:
            raise RuntimeError("torch has turned multicast on, which is never used here")
        offset = self.own.data_ptr() - int(self._handle.buffer_ptrs[rank])
        return [int(address) + offset for address in self._handle.buffer_ptrs]

    def of_rank(self, rank: int) -> torch.Tensor:
        """A rank's memory, uint8 [num_bytes], once they have met."""
        told: torch.Tensor = self._handle.get_buffer(rank, (len(self.own),), torch.uint8)
        return told
