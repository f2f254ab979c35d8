"""Ranks that are not there, where shapes suffice: kernels are compiled, and explained, without the others."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.comm import Comm


class AbsentRanks(Comm):
    """One rank alone, which hears nothing of the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def connect(self) -> None:
        """There is nobody to meet."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Of the right shape."""
        return x.new_empty((self.size, *x.shape))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def close(self) -> None:
        """There is nobody to leave."""
